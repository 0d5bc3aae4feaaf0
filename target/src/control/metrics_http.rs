//! Answers Prometheus and whoever asks whether the target lives, on a listener of its own.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

use crate::metrics::{Metrics, VolumeMetrics};
use crate::volume::Volume;

/// Most connections at a time: a few scrapers and a few people.
const MOST_CONNECTIONS: usize = 32;
/// Longest life of a connection: an idle one must not keep its place for ever. A scraper connects again.
const LIFETIME: Duration = Duration::from_secs(60);
/// How long accepting pauses after an error.
const PAUSE: Duration = Duration::from_millis(100);

/// Whether sessions are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    /// Volumes are being opened, reactors started.
    Starting = 0,
    /// Yes.
    Serving = 1,
    /// Not any more.
    Draining = 2,
}

/// What is told.
#[derive(Debug)]
pub(super) struct Observed {
    metrics: Arc<Metrics>,
    volumes: OnceLock<Vec<(Arc<Volume>, VolumeMetrics)>>,
    readiness: AtomicU8,
}

impl Observed {
    pub(super) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { metrics, volumes: OnceLock::new(), readiness: AtomicU8::new(Readiness::Starting as u8) })
    }

    /// The volumes are open.
    pub(super) fn set_volumes(&self, volumes: &[Arc<Volume>]) {
        let with_metrics = |volume: &Arc<Volume>| {
            let metrics = self.metrics.volume(&volume.name);
            metrics.size_bytes.set(i64::try_from(volume.geometry.size).unwrap_or(i64::MAX));
            (volume.clone(), metrics)
        };
        // Volumes are opened once, so that the second of two calls would say the same.
        let _ = self.volumes.set(volumes.iter().map(with_metrics).collect());
    }

    pub(super) fn set_readiness(&self, readiness: Readiness) {
        self.metrics.ready.set(i64::from(readiness == Readiness::Serving));
        self.readiness.store(readiness as u8, Ordering::SeqCst);
    }

    fn text(&self) -> prometheus::Result<String> {
        for (volume, metrics) in self.volumes.get().into_iter().flatten() {
            // Counted by the volume itself, before the FLUSH that failed is answered (I5).
            let news = volume.failed_syncs().saturating_sub(metrics.failed_syncs.get());
            metrics.failed_syncs.inc_by(news);
        }
        self.metrics.text()
    }
}

/// Serves for ever.
pub(super) async fn serve(listener: TcpListener, observed: Arc<Observed>) {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .with_state(observed);
    let listener = Bounded { listener, places: Arc::new(Semaphore::new(MOST_CONNECTIONS)) };
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!(%error, "metrics are served no more");
    }
}

async fn metrics(State(observed): State<Arc<Observed>>) -> Response {
    match observed.text() {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn readyz(State(observed): State<Arc<Observed>>) -> (StatusCode, &'static str) {
    match observed.readiness.load(Ordering::SeqCst) {
        0 => (StatusCode::SERVICE_UNAVAILABLE, "starting\n"),
        1 => (StatusCode::OK, "ready\n"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
    }
}

/// A listener with a limit of connections and of their lives (I8).
struct Bounded {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl axum::serve::Listener for Bounded {
    type Io = Mortal;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Mortal, SocketAddr) {
        loop {
            // The semaphore is never closed.
            let Ok(place) = self.places.clone().acquire_owned().await else { continue };
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let end = Box::pin(tokio::time::sleep(LIFETIME));
                    return (Mortal { stream, end, _place: place }, peer);
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection for metrics couldn't be accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that ends after [`LIFETIME`].
struct Mortal {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Mortal {
    fn poll_end(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Mortal {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.poll_end(context)?;
        Pin::new(&mut self.stream).poll_read(context, out)
    }
}

impl AsyncWrite for Mortal {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_end(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

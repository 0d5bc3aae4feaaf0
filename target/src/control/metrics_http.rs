//! Answers Prometheus and whoever asks whether the target lives, on a listener of its own: one request for each
//! connection, so that none is kept open for nothing.

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
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::map_response;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};

use super::places::{Place, Places};
use crate::metrics::{Metrics, VolumeMetrics};
use crate::volume::Volume;

/// Most connections at a time: a few scrapers and a few people.
const MOST_CONNECTIONS: usize = 32;
/// How long a connection may take to ask, and then to take the answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
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
        .layer(map_response(last_answer))
        .with_state(observed);
    let listener = Bounded { listener, places: Places::new(MOST_CONNECTIONS, None) };
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!(%error, "metrics are served no more");
    }
}

async fn last_answer(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
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

/// What a connection is at; the earlier it stands here, the sooner it is crowded out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Its request isn't whole.
    Asking,
    /// It is being answered.
    Answering,
}

/// A listener with a limit of connections and of their lives (I8).
struct Bounded {
    listener: TcpListener,
    places: Arc<Places<Stage>>,
}

impl axum::serve::Listener for Bounded {
    type Io = Mortal;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Mortal, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    // There is always one that gives way.
                    let Some((place, crowded_out)) = self.places.admit(Stage::Asking, Stage::Answering) else {
                        continue;
                    };
                    let end = Box::pin(tokio::time::sleep(PATIENCE));
                    return (Mortal { stream, end, place, crowded_out: Some(crowded_out) }, peer);
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

/// A connection that ends by the clock, or when others need its place.
struct Mortal {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    place: Place<Stage>,
    /// Nothing once it was.
    crowded_out: Option<oneshot::Receiver<()>>,
}

impl Mortal {
    fn poll_end(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.end.as_mut().poll(context).is_ready() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if self.crowded_out.as_mut().is_none_or(|notice| Pin::new(notice).poll(context).is_ready()) {
            self.crowded_out = None;
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    /// The first byte of the answer shows that the request was whole.
    fn answers(&mut self) {
        if self.place.stage() == Some(Stage::Asking) && self.place.enter(Stage::Answering).is_ok() {
            self.end.as_mut().reset(Instant::now() + PATIENCE);
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
        self.answers();
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

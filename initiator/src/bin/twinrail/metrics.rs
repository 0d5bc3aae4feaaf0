//! The initiator's metrics: served while a long command runs, and as a table.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use twinrail_initiator::{METRICS, Metrics};

use crate::output;

/// How long a request may take to arrive.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long accepting pauses after an error.
const PAUSE: Duration = Duration::from_millis(100);

/// Longest request in bytes.
const LONGEST_REQUEST: usize = 8 << 10;

/// Metrics that nobody reads yet.
pub(crate) fn new() -> anyhow::Result<Metrics> {
    Metrics::new().map_err(|error| anyhow!("the metrics can't be registered: {error}"))
}

/// Reads an address to serve metrics at.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    let address = text.parse().ok().filter(|address: &SocketAddr| address.port() != 0);
    address.ok_or_else(|| "it must be an IP address and a port, like 127.0.0.1:9451 or [::1]:9451".to_owned())
}

/// Serves metrics at `address`, if there is one, for as long as the process lives: gives them, to be filled.
pub(crate) fn serve(address: Option<SocketAddr>) -> anyhow::Result<Option<Metrics>> {
    let Some(address) = address else { return Ok(None) };
    let metrics = new()?;
    let listener = TcpListener::bind(address)
        .with_context(|| format!("metrics can't be served at {address}: choose another address with --metrics"))?;
    let served = metrics.clone();
    thread::Builder::new()
        .name("metrics".to_owned())
        .spawn(move || answer_all(&listener, &served))
        .context("no thread to serve metrics")?;
    Ok(Some(metrics))
}

/// One reader after the other: that bounds what they can cost.
fn answer_all(listener: &TcpListener, metrics: &Metrics) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                // What a reader does wrong is its own affair.
                let _answered = answer(stream, metrics);
            }
            // Mostly no descriptor is free: not a reason to spin.
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

fn answer(mut stream: TcpStream, metrics: &Metrics) -> io::Result<()> {
    let request = request(&mut stream)?;
    let (status, body) = match path(&request) {
        Some("/metrics") => ("200 OK", metrics.render()),
        Some("/healthz" | "/readyz") => ("200 OK", "ok\n".to_owned()),
        Some(_) => ("404 Not Found", "there are /metrics, /healthz and /readyz\n".to_owned()),
        None => ("400 Bad Request", "only GET is understood\n".to_owned()),
    };
    let header = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(header.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// The bytes of a request up to the empty line.
fn request(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let (deadline, mut bytes) = (Instant::now() + PATIENCE, Vec::with_capacity(1 << 10));
    while !bytes.ends_with(b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || bytes.len() > LONGEST_REQUEST {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let mut chunk = [0; 1 << 10];
        match stream.read(&mut chunk)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            count => bytes.extend_from_slice(&chunk[..count]),
        }
    }
    Ok(bytes)
}

/// The path that a request asks for.
fn path(request: &[u8]) -> Option<&str> {
    let line = std::str::from_utf8(request).ok()?.lines().next()?;
    let (path, version) = line.strip_prefix("GET ")?.split_once(' ')?;
    version.starts_with("HTTP/1.").then_some(path)
}

/// Prints the table of all metrics.
pub(crate) fn print_table() -> anyhow::Result<()> {
    output::print(&table())
}

fn table() -> String {
    let mut table = "| metric | kind | labels | meaning |\n|---|---|---|---|".to_owned();
    for metric in METRICS {
        let labels: Vec<_> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        table += &format!("\n| `{}` | {} | {} | {} |", metric.name, metric.kind.name(), labels.join(", "), metric.help);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(request: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = thread::spawn(move || answer(listener.accept().unwrap().0, &Metrics::new().unwrap()).unwrap());
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        server.join().unwrap();
        answer
    }

    #[test]
    fn metrics_are_served() {
        let answer = get("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        let (header, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(header.starts_with("HTTP/1.1 200 OK\r\n") && header.contains("version=0.0.4"), "{header}");
        assert!(body.contains("twinrail_initiator_build_info{"), "{body}");
        assert!(header.contains(&format!("Content-Length: {}\r\n", body.len())));
    }

    #[test]
    fn other_requests_are_told_what_there_is() {
        assert!(get("GET / HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(get("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 400"));
        assert!(get("GET /healthz HTTP/1.1\r\n\r\n").ends_with("\r\n\r\nok\n"));
    }

    #[test]
    fn an_address_without_a_port_is_refused_with_one_that_has_it() {
        assert!(address("127.0.0.1:9451").is_ok() && address("[::1]:9451").is_ok());
        for bad in ["xx", "9451", "127.0.0.1", "localhost:9451", "127.0.0.1:0", "127.0.0.1:99999"] {
            assert!(address(bad).is_err_and(|error| error.contains("127.0.0.1:9451")), "{bad}");
        }
    }

    #[test]
    fn an_address_in_use_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let error = serve(Some(address)).unwrap_err().to_string();
        assert!(error.contains(&address.to_string()) && error.contains("--metrics"), "{error}");
    }

    #[test]
    fn every_metric_has_a_row() {
        let table = table();
        assert_eq!(table.lines().count(), METRICS.len() + 2);
        assert!(table.lines().all(|row| row.matches('|').count() == 5), "{table}");
    }
}

//! `/metrics` and its neighbours, read over HTTP.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use crate::PATIENCE;

/// Asks for a path; gives status code and body.
///
/// # Panics
/// When nothing answers in time, or not in HTTP.
#[must_use]
pub fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no HTTP answer: {answer:?}"));
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    (code.unwrap_or_else(|| panic!("no HTTP answer: {head:?}")), body.to_owned())
}

/// What `/metrics` said at one time.
#[derive(Clone, Debug)]
pub struct Scrape {
    /// The whole text.
    pub text: String,
}

impl Scrape {
    /// Reads `/metrics`.
    ///
    /// # Panics
    /// When it isn't answered with 200.
    #[must_use]
    pub fn of(address: SocketAddr) -> Self {
        let (code, text) = get(address, "/metrics");
        assert_eq!(code, 200, "{text}");
        Self { text }
    }

    /// Reads `/metrics` again and again until `enough`.
    ///
    /// # Panics
    /// When that takes longer than [`PATIENCE`]; `what` is told then.
    pub fn until(address: SocketAddr, what: &str, enough: impl Fn(&Self) -> bool) -> Self {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let scrape = Self::of(address);
            if enough(&scrape) {
                return scrape;
            }
            assert!(Instant::now() < deadline, "{what} never came true; the last metrics:\n{}", scrape.text);
        }
    }

    /// The sum of all series of a family that have all of these labels; 0 when there is none.
    ///
    /// # Panics
    /// When a value is no number.
    #[must_use]
    pub fn sum(&self, family: &str, labels: &[(&str, &str)]) -> f64 {
        let of_family = self.text.lines().filter_map(|line| {
            let rest = line.strip_prefix(family)?;
            let (series, value) = rest.rsplit_once(' ')?;
            matches!(series.as_bytes().first(), None | Some(b'{')).then_some((series, value))
        });
        let wanted: Vec<String> = labels.iter().map(|(key, value)| format!("{key}=\"{value}\"")).collect();
        let chosen = of_family.filter(|(series, _)| wanted.iter().all(|label| series.contains(label.as_str())));
        chosen.map(|(_, value)| value.parse::<f64>().unwrap()).sum()
    }
}

//! The address of a volume, as people write it: `twinrail://host[:port]/volume[?rdma=host:port]`.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use twinrail_protocol::limits::MAX_VOLUME_NAME;

/// The port that a target listens on unless told otherwise, for TCP and for RDMA.
pub const DEFAULT_PORT: u16 = 4450;

const SCHEME: &str = "twinrail://";

/// Where a volume is: target and name.
///
/// ```
/// use twinrail_initiator::VolumeUrl;
///
/// let url: VolumeUrl = "twinrail://[fd00::7]/disk0?rdma=10.1.0.7:4450".parse()?;
/// assert_eq!((url.target.host.as_str(), url.target.port, url.volume.as_str()), ("fd00::7", 4450, "disk0"));
/// assert_eq!(url.to_string(), "twinrail://[fd00::7]:4450/disk0?rdma=10.1.0.7:4450");
/// # Ok::<(), twinrail_initiator::UrlError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VolumeUrl {
    /// Where the target listens for TCP connections.
    pub target: Endpoint,
    /// The volume's name, 1 to [`MAX_VOLUME_NAME`] bytes of printable UTF-8.
    pub volume: String,
    /// Where the target listens for RDMA, if it is to be another portal than those it tells by itself.
    pub rdma: Option<Endpoint>,
}

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Host name or address; an IPv6 address without its brackets.
    pub host: String,
    /// Port, never 0.
    pub port: u16,
}

/// What is wrong with the text of a [`VolumeUrl`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not the address of a volume: {fault}; the form is twinrail://host[:port]/volume[?rdma=host:port]")]
pub struct UrlError {
    /// The text.
    pub text: String,
    /// The fault.
    pub fault: UrlFault,
}

/// The part of a URL that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlFault {
    /// It doesn't begin with the scheme.
    #[error("it must begin with `twinrail://`")]
    Scheme,
    /// There is no host.
    #[error("the host is missing")]
    NoHost,
    /// A host with characters that no name or address has.
    #[error("`{0}` is no host name and no address (an IPv6 address stands in brackets: `[fd00::7]`)")]
    Host(String),
    /// Brackets that don't hold an IPv6 address.
    #[error("`[{0}]` is no IPv6 address")]
    Ipv6(String),
    /// A port that isn't a number from 1 to 65535.
    #[error("`{0}` is no port: a number from 1 to 65535 is")]
    Port(String),
    /// There is no volume.
    #[error("the name of the volume is missing")]
    NoVolume,
    /// A volume's name that no volume can have.
    #[error("`{0}` can't be the name of a volume: 1 to {MAX_VOLUME_NAME} bytes without `/`, `?`, `#`, `%` and spaces")]
    Volume(String),
    /// An option other than `rdma`.
    #[error("`{0}` is no option: the only one is `rdma=host:port`")]
    Option(String),
    /// An address for RDMA that isn't whole: unlike the target's it has no port by default.
    #[error("`rdma={0}` has no port: write `rdma=host:port`")]
    NoRdmaPort(String),
    /// Two addresses for RDMA.
    #[error("`rdma` is there twice")]
    RdmaTwice,
}

impl FromStr for VolumeUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        parse(text).map_err(|fault| UrlError { text: text.to_owned(), fault })
    }
}

fn parse(text: &str) -> Result<VolumeUrl, UrlFault> {
    let rest = text.strip_prefix(SCHEME).ok_or(UrlFault::Scheme)?;
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
    let (host, volume) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, port) = endpoint(host)?;
    let target = Endpoint { host, port: port.unwrap_or(DEFAULT_PORT) };
    if volume.is_empty() {
        return Err(UrlFault::NoVolume);
    }
    let foreign = |c: char| c.is_control() || c.is_whitespace() || matches!(c, '/' | '?' | '#' | '%');
    if volume.len() > MAX_VOLUME_NAME || volume.contains(foreign) {
        return Err(UrlFault::Volume(volume.to_owned()));
    }
    let mut rdma = None;
    for option in query.into_iter().flat_map(|query| query.split('&')) {
        match option.split_once('=') {
            Some(("rdma", _)) if rdma.is_some() => return Err(UrlFault::RdmaTwice),
            Some(("rdma", value)) => {
                let (host, port) = endpoint(value)?;
                let port = port.ok_or_else(|| UrlFault::NoRdmaPort(value.to_owned()))?;
                rdma = Some(Endpoint { host, port });
            }
            _ => return Err(UrlFault::Option(option.to_owned())),
        }
    }
    Ok(VolumeUrl { target, volume: volume.to_owned(), rdma })
}

/// A host, and a port if there is one.
fn endpoint(text: &str) -> Result<(String, Option<u16>), UrlFault> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']').ok_or_else(|| UrlFault::Ipv6(rest.to_owned()))?;
            // A scope (`fe80::1%eth0`) is the resolver's to understand.
            let plain = address.split_once('%').map_or(address, |(plain, _scope)| plain);
            plain.parse::<Ipv6Addr>().map_err(|_| UrlFault::Ipv6(address.to_owned()))?;
            let port = match rest {
                "" => None,
                _ => Some(rest.strip_prefix(':').ok_or_else(|| UrlFault::Port(rest.to_owned()))?),
            };
            (address, port)
        }
        None => {
            let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
            if port.is_some_and(|port| port.contains(':')) {
                return Err(UrlFault::Host(text.to_owned()));
            }
            if host.chars().any(|c| !(c.is_alphanumeric() || matches!(c, '.' | '-' | '_'))) {
                return Err(UrlFault::Host(host.to_owned()));
            }
            (host, port)
        }
    };
    if host.is_empty() {
        return Err(UrlFault::NoHost);
    }
    let number = |text: &str| text.parse().ok().filter(|&port| port > 0).ok_or_else(|| UrlFault::Port(text.to_owned()));
    Ok((host.to_owned(), port.map(number).transpose()?))
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for VolumeUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.target, self.volume)?;
        match &self.rdma {
            Some(rdma) => write!(f, "?rdma={rdma}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fault(text: &str) -> UrlFault {
        text.parse::<VolumeUrl>().unwrap_err().fault
    }

    #[test]
    fn the_parts_of_a_url() {
        let url: VolumeUrl = "twinrail://shelf-3.example:5000/disk0?rdma=[fe80::1%eth0]:4451".parse().unwrap();
        assert_eq!(url.target, Endpoint { host: "shelf-3.example".into(), port: 5000 });
        assert_eq!(url.volume, "disk0");
        assert_eq!(url.rdma, Some(Endpoint { host: "fe80::1%eth0".into(), port: 4451 }));
        let short: VolumeUrl = "twinrail://::1/x".parse().unwrap_or_else(|_| "twinrail://[::1]/x".parse().unwrap());
        assert_eq!(short.to_string(), "twinrail://[::1]:4450/x");
    }

    #[test]
    fn each_fault_is_named() {
        assert_eq!(fault("nbd://host/disk"), UrlFault::Scheme);
        assert_eq!(fault("twinrail:///disk"), UrlFault::NoHost);
        assert_eq!(fault("twinrail://:4450/disk"), UrlFault::NoHost);
        assert_eq!(fault("twinrail://fd00::7/disk"), UrlFault::Host("fd00::7".into()));
        assert_eq!(fault("twinrail://a b/disk"), UrlFault::Host("a b".into()));
        assert_eq!(fault("twinrail://[fd00::7/disk"), UrlFault::Ipv6("fd00::7".into()));
        assert_eq!(fault("twinrail://[10.0.0.1]/disk"), UrlFault::Ipv6("10.0.0.1".into()));
        assert_eq!(fault("twinrail://[::1]x/disk"), UrlFault::Port("x".into()));
        assert_eq!(fault("twinrail://host:0/disk"), UrlFault::Port("0".into()));
        assert_eq!(fault("twinrail://host:65536/disk"), UrlFault::Port("65536".into()));
        assert_eq!(fault("twinrail://host:/disk"), UrlFault::Port(String::new()));
        assert_eq!(fault("twinrail://host"), UrlFault::NoVolume);
        assert_eq!(fault("twinrail://host/"), UrlFault::NoVolume);
        assert_eq!(fault("twinrail://host/a/b"), UrlFault::Volume("a/b".into()));
        assert_eq!(fault("twinrail://host/disk?tcp=no"), UrlFault::Option("tcp=no".into()));
        assert_eq!(fault("twinrail://host/disk?rdma=a:1&rdma=b:1"), UrlFault::RdmaTwice);
        let long = "v".repeat(MAX_VOLUME_NAME + 1);
        assert_eq!(fault(&format!("twinrail://host/{long}")), UrlFault::Volume(long));
        let error = "twinrail://host".parse::<VolumeUrl>().unwrap_err().to_string();
        assert!(error.contains("volume is missing") && error.contains("twinrail://host[:port]/volume"), "{error}");
    }

    #[test]
    fn an_rdma_address_without_a_port_passed() {
        assert_eq!(fault("twinrail://host/disk?rdma=xx"), UrlFault::NoRdmaPort("xx".into()));
        assert_eq!(fault("twinrail://host/disk?rdma=[::1]"), UrlFault::NoRdmaPort("[::1]".into()));
        assert_eq!(fault("twinrail://host/disk?rdma=xx:0"), UrlFault::Port("0".into()));
        assert_eq!(fault("twinrail://host/disk?rdma="), UrlFault::NoHost);
    }

    proptest! {
        #[test]
        fn any_text_is_a_url_or_an_error_and_a_url_reads_back(text in "(twinrail://)?[\\[\\]a-z0-9:./?=&%_ -]{0,40}") {
            if let Ok(url) = text.parse::<VolumeUrl>() {
                prop_assert_eq!(url.to_string().parse::<VolumeUrl>(), Ok(url));
            }
        }
    }
}

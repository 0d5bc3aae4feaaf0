//! Processor time of this process, and of the target's if it runs on the same host.

use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use rustix::time::{ClockId, clock_gettime};

/// Processor seconds of this process so far, all threads together.
pub(super) fn of_this_process() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Processor seconds of another process so far, all threads together.
pub(super) fn of_process(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in parentheses, and may have some of its own.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some((user + system) as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The process at the other end of one of our connections to `port`, if it is on this host and may be looked at.
pub(super) fn peer_process(port: u16) -> Option<u32> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|table| fs::read_to_string(table).unwrap_or_default());
    let connections: Vec<Connection> = tables.iter().flat_map(|table| table.lines()).filter_map(parse).collect();
    let ours = sockets_of(Path::new("/proc/self/fd"));
    let theirs = peers(&connections, &ours, port);
    if theirs.is_empty() {
        return None;
    }
    let processes = fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes.filter(|&pid: &u32| pid != std::process::id()).find(|pid| {
        let sockets = sockets_of(Path::new(&format!("/proc/{pid}/fd")));
        theirs.iter().any(|inode| sockets.contains(inode))
    })
}

/// A row of the kernel's table of TCP sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Connection {
    local: SocketAddr,
    remote: SocketAddr,
    state: u8,
    inode: u64,
}

const ESTABLISHED: u8 = 1;
const LISTENING: u8 = 10;

/// The sockets that the other end of our connections to `port` may own: the ends themselves, and the listener,
/// since a ring may hold sockets that no descriptor shows.
fn peers(connections: &[Connection], ours: &HashSet<u64>, port: u16) -> Vec<u64> {
    let mine =
        connections.iter().filter(|c| c.state == ESTABLISHED && c.remote.port() == port && ours.contains(&c.inode));
    let mirrored = |mine: &Connection| {
        connections.iter().find(|c| c.local == mine.remote && c.remote == mine.local && c.state == ESTABLISHED)
    };
    let mut theirs: Vec<u64> = mine.filter_map(mirrored).map(|c| c.inode).collect();
    if !theirs.is_empty() {
        let listeners = connections.iter().filter(|c| c.state == LISTENING && c.local.port() == port);
        theirs.extend(listeners.map(|c| c.inode));
    }
    theirs.retain(|&inode| inode != 0);
    theirs
}

fn parse(row: &str) -> Option<Connection> {
    let mut fields = row.split_whitespace().skip(1);
    let (local, remote) = (endpoint(fields.next()?)?, endpoint(fields.next()?)?);
    let state = u8::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.nth(5)?.parse().ok()?;
    Some(Connection { local, remote, state, inode })
}

/// An address of the kernel's table: words in the host's byte order, in hexadecimal.
fn endpoint(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let mut bytes = [0; 16];
    let words = address.len() / 8;
    for (word, into) in bytes.chunks_exact_mut(4).enumerate().take(words) {
        let digits = address.get(word * 8..word * 8 + 8)?;
        into.copy_from_slice(&u32::from_str_radix(digits, 16).ok()?.to_ne_bytes());
    }
    let address: IpAddr = match words {
        1 => Ipv4Addr::from(*bytes.first_chunk::<4>()?).into(),
        4 => Ipv6Addr::from(bytes).to_canonical(),
        _ => return None,
    };
    Some(SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?))
}

/// The inodes of the sockets that a folder of descriptors shows.
fn sockets_of(folder: &Path) -> HashSet<u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.filter_map(|link| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn rows_of_the_kernels_table_are_read() {
        if cfg!(target_endian = "big") {
            return;
        }
        let row = "   1: 0100007F:1162 0200007F:C001 01 00000000:00000000 00:00000000 00000000  1000        0 4711 1 x";
        let expected = Connection {
            local: "127.0.0.1:4450".parse().unwrap(),
            remote: "127.0.0.2:49153".parse().unwrap(),
            state: ESTABLISHED,
            inode: 4711,
        };
        assert_eq!(parse(row), Some(expected));
        assert_eq!(endpoint("0000000000000000FFFF00000100007F:1162").unwrap(), expected.local);
        assert_eq!(endpoint("00000000000000000000000001000000:0050").unwrap(), "[::1]:80".parse().unwrap());
        assert_eq!(parse("  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid"), None);
    }

    #[test]
    fn the_other_end_of_a_connection_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let _here = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (_there, _) = listener.accept().unwrap();
        let table = fs::read_to_string("/proc/net/tcp").unwrap();
        let connections: Vec<_> = table.lines().filter_map(parse).collect();
        let ours = sockets_of(Path::new("/proc/self/fd"));
        let theirs = peers(&connections, &ours, port);
        // Its end and the listener, both of which this process has too.
        assert_eq!(theirs.len(), 2);
        assert!(theirs.iter().all(|inode| ours.contains(inode)));
        assert!(peers(&connections, &HashSet::new(), port).is_empty(), "a connection that isn't ours");
    }

    #[test]
    fn time_passes() {
        let (before, by_stat) = (of_this_process(), of_process(std::process::id()).unwrap());
        let mut sum = 0u64;
        while of_this_process() < before + 0.05 {
            sum = sum.wrapping_add(std::hint::black_box(1));
        }
        assert!(of_process(std::process::id()).unwrap() > by_stat, "{sum}");
        assert!(of_process(u32::MAX).is_none());
    }
}

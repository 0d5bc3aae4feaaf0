//! The socket below: a non-blocking TCP connection, set up for a block transport.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use crate::{ReceiveVectored, SendVectored};

/// How a connection is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Name of the congestion control; `None` leaves the kernel's default. Many hosts default to BBR, which
    /// on a loopback or data-centre path paces a block transport to half its speed: hence `cubic` here.
    /// One that the kernel lacks or doesn't allow is no error, see [`Socket::congestion`].
    pub congestion: Option<String>,
    /// Size of the send buffer in bytes; `None` leaves it to the kernel's autotuning, which mostly does
    /// better.
    pub send_buffer: Option<usize>,
    /// Size of the receive buffer in bytes; `None` as above.
    pub receive_buffer: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self { congestion: Some("cubic".to_owned()), send_buffer: None, receive_buffer: None }
    }
}

/// A non-blocking TCP connection.
#[derive(Debug)]
pub struct Socket {
    socket: socket2::Socket,
    congestion: String,
}

impl Socket {
    /// Takes over a connection.
    ///
    /// # Errors
    /// An option other than the congestion control can't be set.
    pub fn from_stream(stream: TcpStream, options: &Options) -> io::Result<Self> {
        let socket = socket2::Socket::from(stream);
        socket.set_nonblocking(true)?;
        // A frame that waits to be filled up is latency; whole frames are gathered before they are sent.
        socket.set_tcp_nodelay(true)?;
        if let Some(size) = options.send_buffer {
            socket.set_send_buffer_size(size)?;
        }
        if let Some(size) = options.receive_buffer {
            socket.set_recv_buffer_size(size)?;
        }
        if let Some(name) = &options.congestion {
            let _refused_is_seen_below = socket.set_tcp_congestion(name.as_bytes());
        }
        // The kernel pads the name with zeros.
        let name = socket.tcp_congestion().unwrap_or_default();
        let name = name.split(|&b| b == 0).next().unwrap_or_default();
        let congestion = String::from_utf8_lossy(name).into_owned();
        Ok(Self { socket, congestion })
    }

    /// The congestion control in force.
    #[must_use]
    pub fn congestion(&self) -> &str {
        &self.congestion
    }

    /// The peer's address.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()?.as_socket().ok_or(io::ErrorKind::Unsupported.into())
    }

    /// Says that nothing more will be sent, after what is still with the kernel.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn shutdown_write(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// Resets the connection: whatever the kernel has not sent yet is dropped and never sent later. This is
    /// the socket's part of the fence (I2).
    ///
    /// The kernel acts when the last reference to the socket goes: requests of a ring that use it must have
    /// been cancelled and reaped before, and no duplicate of its descriptor may be left.
    ///
    /// # Errors
    /// The kernel refused to drop what is unsent; the connection is closed all the same.
    pub fn abort(self) -> io::Result<()> {
        self.socket.set_linger(Some(Duration::ZERO))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ReceiveVectored for Socket {
    fn receive_vectored(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&self.socket).read_vectored(slices)
    }
}

impl SendVectored for Socket {
    /// Never raises SIGPIPE: a library can't count on its host to ignore it.
    fn send_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.socket.send_vectored_with_flags(slices, libc::MSG_NOSIGNAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripted::{Sent, bytes, probe, write};
    use crate::{Arrival, Filled, Flushed, Inbound, Outbound};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::net::TcpListener;
    use twinrail_protocol::limits::DEFAULT_IN_CAPSULE;

    fn pair(options: &Options) -> (Socket, Socket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (there, _) = listener.accept().unwrap();
        (Socket::from_stream(here, options).unwrap(), Socket::from_stream(there, options).unwrap())
    }

    fn wait(fds: &mut [PollFd<'_>]) {
        assert!(poll(fds, Some(&Timespec { tv_sec: 10, tv_nsec: 0 })).unwrap() > 0, "nothing happens");
    }

    fn wait_readable(socket: &Socket) {
        wait(&mut [PollFd::new(socket, PollFlags::IN)]);
    }

    #[test]
    fn frames_cross_a_real_connection() {
        // Small buffers, so that many sends and receives are partial.
        let options = Options { send_buffer: Some(16 << 10), receive_buffer: Some(16 << 10), ..Options::default() };
        let (here, there) = pair(&options);
        assert_eq!(here.peer_addr().unwrap(), there.socket.local_addr().unwrap().as_socket().unwrap());
        let frames: Vec<Sent> =
            (0..40).map(|i| write(i, bytes([0, 512, 4096, 300_000][usize::from(i) % 4], i as u8))).collect();
        let mut outbound = Outbound::new(frames.len());
        for (i, (frame, payload)) in frames.iter().enumerate() {
            outbound.push(frame.encode(), (!payload.is_empty()).then_some(i)).unwrap();
        }
        let (mut inbound, mut seen, mut destination) =
            (Inbound::new(DEFAULT_IN_CAPSULE), Vec::<Sent>::new(), Vec::new());
        let mut flushed = Flushed::More;
        'connection: loop {
            if flushed != Flushed::Empty {
                flushed = outbound.flush(&here, 1 << 20, |i| &frames[*i].1, drop).unwrap();
                if flushed == Flushed::Empty {
                    here.shutdown_write().unwrap();
                }
            }
            loop {
                match inbound.next().unwrap() {
                    Arrival::Frame { frame, payload } => seen.push((frame, payload.to_vec())),
                    Arrival::Large { frame } => {
                        destination = vec![0; frame.following() as usize];
                        inbound.place(&mut destination);
                        seen.push((frame, Vec::new()));
                    }
                    Arrival::PayloadComplete => seen.last_mut().unwrap().1 = std::mem::take(&mut destination),
                    Arrival::Pending => match inbound.fill(&there, &mut destination).unwrap() {
                        Filled::Bytes { drained: false, .. } => {}
                        Filled::Bytes { drained: true, .. } | Filled::WouldBlock => break,
                        Filled::Closed => break 'connection,
                        Filled::Full => panic!("no room although everything was taken"),
                    },
                }
            }
            let out = if flushed == Flushed::Empty { PollFlags::empty() } else { PollFlags::OUT };
            wait(&mut [PollFd::new(&there, PollFlags::IN), PollFd::new(&here, out)]);
        }
        assert_eq!(seen, frames);
    }

    #[test]
    fn an_aborted_connection_is_reset_and_sends_nothing_later() {
        let (here, there) = pair(&Options::default());
        // More than the buffers of both sides hold: some of it is with the kernel, unsent.
        let payload = bytes(16 << 20, 1);
        let mut outbound = Outbound::new(1);
        outbound.push(write(1, payload.clone()).0.encode(), Some(())).unwrap();
        assert_eq!(outbound.flush(&here, usize::MAX, |()| &payload, drop).unwrap(), Flushed::WouldBlock);
        here.abort().unwrap();
        outbound.drain(drop);

        let mut inbound = Inbound::new(DEFAULT_IN_CAPSULE);
        let error = loop {
            wait_readable(&there);
            if let Ok(Arrival::Large { .. }) = inbound.next() {
                inbound.skip();
            }
            match inbound.fill(&there, &mut []) {
                Ok(Filled::Closed) => panic!("an orderly end"),
                Ok(_) => {}
                Err(e) => break e,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn a_send_to_a_closed_peer_is_an_error() {
        let (here, there) = pair(&Options::default());
        there.abort().unwrap();
        wait_readable(&here);
        let mut outbound = Outbound::<()>::new(1);
        // The first may be told of the reset, the next ones of the broken pipe.
        let kinds: Vec<_> = (0..2)
            .map(|_| {
                outbound.push_control(probe(1).0.encode(), &[]).unwrap();
                outbound.flush(&here, 1000, |()| &[], drop).unwrap_err().kind()
            })
            .collect();
        assert!(kinds.contains(&io::ErrorKind::BrokenPipe), "{kinds:?}");
    }

    #[test]
    fn a_congestion_control_that_is_missing_leaves_the_one_in_force() {
        let (default, _there) = pair(&Options { congestion: None, ..Options::default() });
        assert!(!default.congestion().is_empty());
        let (other, _there) = pair(&Options { congestion: Some("no-such-thing".into()), ..Options::default() });
        assert_eq!(other.congestion(), default.congestion());
    }
}

//! A connection of a queue that isn't its path (yet): handshake and control frames, one by one, without blocking and
//! without reading a byte beyond them.

use std::io::{self, IoSlice, IoSliceMut};

use twinrail_fallback_tcp::{ReceiveVectored, SendVectored, Socket};
use twinrail_protocol::limits::{HEADER_LEN, MAX_HANDSHAKE_PAYLOAD};
use twinrail_protocol::wire::{Fault, Frame};
use twinrail_protocol::{Status, Violation, crc32c};

use crate::error::PathEnd;

/// Most bytes that may wait to be sent beside one ACTIVATE.
const MOST_WAITING: usize = HEADER_LEN + MAX_HANDSHAKE_PAYLOAD + 16 * HEADER_LEN;

/// Such a connection.
#[derive(Debug)]
pub(crate) struct Line {
    socket: Socket,
    out: Vec<u8>,
    sent: usize,
    /// Room for one frame.
    frame: Box<[u8]>,
    got: usize,
}

impl Line {
    pub(crate) fn new(socket: Socket) -> Self {
        let frame = vec![0; HEADER_LEN + MAX_HANDSHAKE_PAYLOAD].into_boxed_slice();
        Self { socket, out: Vec::with_capacity(HEADER_LEN), sent: 0, frame, got: 0 }
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// It becomes a path: everything that came before its first frame was taken.
    pub(crate) fn into_socket(self) -> Socket {
        self.socket
    }

    /// Nothing that was said and hasn't left is ever sent (I2).
    pub(crate) fn abort(self) {
        drop(self.socket.abort());
    }

    /// Whether something waits to be sent.
    pub(crate) fn is_blocked(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Sends a frame, now or with [`Self::flush`].
    pub(crate) fn say(&mut self, bytes: &[u8]) -> Result<(), PathEnd> {
        if self.out.len() - self.sent + bytes.len() > MOST_WAITING {
            let detail = "a target that asks on and on and takes no answer";
            return Err(Violation { status: Status::CONTROL_OVERRUN, detail }.into());
        }
        self.out.extend_from_slice(bytes);
        self.flush()
    }

    /// Sends what waits, as far as the socket takes it.
    pub(crate) fn flush(&mut self) -> Result<(), PathEnd> {
        while self.sent < self.out.len() {
            match self.socket.send_vectored(&[IoSlice::new(&self.out[self.sent..])]) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        (self.sent, _) = (0, self.out.clear());
        Ok(())
    }

    /// The next frame and its payload, if it is there.
    pub(crate) fn hear(&mut self) -> Result<Option<(Frame, &[u8])>, PathEnd> {
        if !self.fill(HEADER_LEN)? {
            return Ok(None);
        }
        let broken = |fault: Fault| PathEnd::from(Violation::from(fault));
        let header = self.frame.first_chunk().ok_or_else(|| broken(Fault::BadMagic))?;
        let frame = Frame::decode(header).map_err(broken)?;
        if !matches!(frame, Frame::Handshake { .. } | Frame::Control(_)) {
            let detail = "a frame of a queue on a connection that isn't its path";
            return Err(Violation { status: Status::UNEXPECTED_FRAME, detail }.into());
        }
        // Bounded by `Frame::decode`.
        let end = (HEADER_LEN + frame.following() as usize).min(self.frame.len());
        if !self.fill(end)? {
            return Ok(None);
        }
        self.got = 0;
        let payload = &self.frame[HEADER_LEN..end];
        if matches!(frame, Frame::Control(_)) && crc32c(payload) != frame.payload().crc {
            return Err(broken(Fault::ControlCrc));
        }
        Ok(Some((frame, payload)))
    }

    /// Whether the frame's first `end` bytes are there.
    fn fill(&mut self, end: usize) -> Result<bool, PathEnd> {
        while self.got < end {
            match self.socket.receive_vectored(&mut [IoSliceMut::new(&mut self.frame[self.got..end])]) {
                Ok(0) => return Err(PathEnd::ClosedByTarget),
                Ok(count) => self.got += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

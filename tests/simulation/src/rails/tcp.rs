//! One end of a TCP connection, as the kernel keeps it: bytes come in order or not at all, late after a cut,
//! and a socket takes only so many that the peer's application hasn't read.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};

use twinrail_fallback_tcp::{ReceiveVectored, SendVectored};

use crate::clock::Time;

/// Bytes on their way to one end, and those that have arrived.
#[derive(Debug, Default)]
pub struct Stream {
    bytes: VecDeque<u8>,
    /// Of these so many can be read.
    arrived: usize,
    /// Lengths of the pieces that haven't arrived; 0 is the end of the stream.
    flying: VecDeque<u32>,
    /// No piece arrives before this time: they stay in order.
    last_arrival: Time,
    /// Pieces that found the cable cut.
    pub stalled: u32,
    /// The end of the stream arrived.
    pub ended: bool,
    /// The sender found no room, and wants to hear of some.
    pub sender_waits: bool,
    /// Most bytes that may wait here.
    pub window: usize,
}

impl Stream {
    /// An empty stream; keeps its memory.
    pub fn reset(&mut self, window: usize) {
        self.bytes.clear();
        self.flying.clear();
        (self.arrived, self.last_arrival, self.stalled) = (0, 0, 0);
        (self.ended, self.sender_waits, self.window) = (false, false, window);
    }

    /// Takes what fits of `slices`; the number of bytes, and when they arrive if that isn't before `at`.
    pub fn send<'a>(&mut self, slices: impl IntoIterator<Item = &'a [u8]>, at: Time) -> (usize, Time) {
        let mut room = self.window.saturating_sub(self.bytes.len());
        let mut sent = 0;
        for slice in slices {
            let count = slice.len().min(room);
            self.bytes.extend(&slice[..count]);
            room -= count;
            sent += count;
            if count < slice.len() {
                self.sender_waits = true;
                break;
            }
        }
        if sent > 0 {
            self.flying.push_back(sent as u32);
            self.last_arrival = self.last_arrival.max(at);
        }
        (sent, self.last_arrival)
    }

    /// The sender sends no more; when that arrives.
    pub fn end(&mut self, at: Time) -> Time {
        self.flying.push_back(0);
        self.last_arrival = self.last_arrival.max(at);
        self.last_arrival
    }

    /// The next piece arrives.
    pub fn arrive(&mut self) {
        match self.flying.pop_front() {
            Some(0) => self.ended = true,
            Some(length) => self.arrived += length as usize,
            None => {}
        }
    }

    /// Whether something is to be read, the end included.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.arrived > 0 || self.ended
    }

    /// The byte sent last, if it is still on the way.
    pub fn last_byte(&mut self) -> &mut [u8] {
        match self.bytes.len() > self.arrived {
            true => {
                let (a, b) = self.bytes.as_mut_slices();
                let bytes = if b.is_empty() { a } else { b };
                let last = bytes.len() - 1;
                &mut bytes[last..]
            }
            false => &mut [],
        }
    }

    /// When the latest piece arrives.
    #[must_use]
    pub fn last_arrival(&self) -> Time {
        self.last_arrival
    }

    /// Bytes that can be read.
    #[must_use]
    pub fn arrived(&self) -> usize {
        self.arrived
    }

    /// Reads exactly `into.len()` bytes, or nothing.
    pub fn read_exact(&mut self, into: &mut [u8]) -> bool {
        if self.arrived < into.len() {
            return false;
        }
        self.take(into);
        true
    }

    fn take(&mut self, into: &mut [u8]) {
        let (a, b) = self.bytes.as_slices();
        let from_a = into.len().min(a.len());
        into[..from_a].copy_from_slice(&a[..from_a]);
        let rest = into.len() - from_a;
        into[from_a..].copy_from_slice(&b[..rest]);
        self.bytes.drain(..into.len());
        self.arrived -= into.len();
    }

    /// As [`twinrail_fallback_tcp::ReceiveVectored`] has it.
    ///
    /// # Errors
    /// `WouldBlock` when nothing has arrived.
    pub fn receive(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if self.arrived == 0 {
            return if self.ended { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let mut count = 0;
        for slice in slices {
            let length = slice.len().min(self.arrived);
            self.take(&mut slice[..length]);
            count += length;
        }
        Ok(count)
    }
}

/// What the rail's framing takes for a socket that it receives from.
#[derive(Debug)]
pub struct Receiver<'a>(pub RefCell<&'a mut Stream>);

impl ReceiveVectored for Receiver<'_> {
    fn receive_vectored(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.0.borrow_mut().receive(slices)
    }
}

/// What it takes for a socket that it sends through: the stream towards the peer.
#[derive(Debug)]
pub struct Sender<'a> {
    /// The stream.
    pub stream: RefCell<&'a mut Stream>,
    /// When a piece that is sent now would arrive.
    pub at: Time,
    /// Arrivals that came of it.
    pub pieces: Cell<u32>,
}

impl SendVectored for Sender<'_> {
    fn send_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut stream = self.stream.borrow_mut();
        match stream.send(slices.iter().map(|s| &s[..]), self.at).0 {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            sent => {
                self.pieces.set(self.pieces.get() + 1);
                Ok(sent)
            }
        }
    }
}

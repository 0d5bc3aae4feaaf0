//! Buffers that devices read and write, and who holds them (I3).
//!
//! Each time a buffer is lent to a device it gets another [`Lent`] handle. A device that comes late still
//! touches the same bytes, as real ones do, and the history says so.

use crate::history::{History, Lending, Side, What};

/// A buffer while it is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// Which buffer.
    pub buffer: u32,
    /// Which lending of it.
    pub lending: Lending,
}

#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
}

/// All buffers of a run, on both sides.
#[derive(Debug, Default)]
pub struct Memory {
    buffers: Vec<Buffer>,
    /// Buffers that nobody has.
    free: Vec<u32>,
    lendings: u32,
    used: usize,
}

impl Memory {
    /// Forgets everything; keeps the memory itself.
    pub fn reset(&mut self) {
        self.free.clear();
        (self.lendings, self.used) = (0, 0);
    }

    /// Takes a buffer of `length` bytes and lends it; its bytes are whatever was there before.
    pub fn lend(&mut self, length: usize, side: Side, now: u64, history: &mut History) -> Lent {
        let buffer = self.free.pop().unwrap_or_else(|| {
            let next = self.used as u32;
            self.used += 1;
            if self.buffers.len() < self.used {
                self.buffers.push(Buffer::default());
            }
            next
        });
        self.lendings += 1;
        let lent = Lent { buffer, lending: Lending(self.lendings) };
        self.buffers[buffer as usize].bytes.resize(length, 0);
        history.record(now, What::Lent { buffer, lending: lent.lending, side });
        lent
    }

    /// The buffer is its owner's again, who lends it to somebody else at once: the last one back is the first
    /// one out, so that late devices hit.
    pub fn give_back(&mut self, lent: Lent, now: u64, history: &mut History) {
        let Lent { buffer, lending } = lent;
        debug_assert!(!self.free.contains(&buffer), "given back twice");
        self.free.push(buffer);
        history.record(now, What::Returned { buffer, lending });
    }

    /// The bytes, for the owner.
    #[must_use]
    pub fn bytes(&self, lent: Lent) -> &[u8] {
        &self.buffers[lent.buffer as usize].bytes
    }

    /// The bytes, for the owner.
    pub fn bytes_mut(&mut self, lent: Lent) -> &mut [u8] {
        &mut self.buffers[lent.buffer as usize].bytes
    }

    /// A device reads.
    pub fn read(&self, lent: Lent, length: usize, now: u64, history: &mut History) -> &[u8] {
        history.record(now, What::Touched { buffer: lent.buffer, lending: lent.lending });
        let bytes = &self.buffers[lent.buffer as usize].bytes;
        &bytes[..length.min(bytes.len())]
    }

    /// A device writes `bytes` to the front of the buffer.
    pub fn write(&mut self, lent: Lent, bytes: &[u8], now: u64, history: &mut History) {
        history.record(now, What::Touched { buffer: lent.buffer, lending: lent.lending });
        let own = &mut self.buffers[lent.buffer as usize].bytes;
        let length = bytes.len().min(own.len());
        own[..length].copy_from_slice(&bytes[..length]);
    }
}

//! Stand-ins for a socket and the frames that the tests send through it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};

use proptest::prelude::*;
use twinrail_protocol::ids::{Epoch, Sequence, Slot};
use twinrail_protocol::limits::MAX_TEXT;
use twinrail_protocol::status::Status;
use twinrail_protocol::wire::{Command, Control, ControlKind, Credits, Frame, Payload, Reply, Transfer};
use twinrail_protocol::{Flags, Opcode, crc32c};

use crate::{ReceiveVectored, SendVectored};

/// A socket whose every call moves as many bytes as the script says next, over and over; 0 stands for
/// WouldBlock.
#[derive(Debug, Default)]
pub(crate) struct Scripted {
    pub(crate) stream: RefCell<VecDeque<u8>>,
    pub(crate) calls: Cell<usize>,
    script: Vec<usize>,
}

impl Scripted {
    pub(crate) fn new(stream: impl Into<VecDeque<u8>>, script: &[usize]) -> Self {
        Self { stream: RefCell::new(stream.into()), calls: Cell::new(0), script: script.to_vec() }
    }

    fn allowance(&self) -> io::Result<usize> {
        let call = self.calls.replace(self.calls.get() + 1);
        match self.script.get(call % self.script.len().max(1)).copied() {
            Some(0) => Err(io::ErrorKind::WouldBlock.into()),
            Some(n) => Ok(n),
            None => Ok(usize::MAX),
        }
    }
}

impl ReceiveVectored for Scripted {
    fn receive_vectored(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut stream = self.stream.borrow_mut();
        let most = self.allowance()?.min(stream.len());
        let mut count = 0;
        for slice in slices {
            let n = slice.len().min(most - count);
            slice[..n].iter_mut().zip(stream.drain(..n)).for_each(|(to, from)| *to = from);
            count += n;
        }
        Ok(count)
    }
}

impl SendVectored for Scripted {
    fn send_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let most = self.allowance()?;
        let before = self.stream.borrow().len();
        self.stream.borrow_mut().extend(slices.iter().flat_map(|s| s.iter()).take(most));
        Ok(self.stream.borrow().len() - before)
    }
}

/// A frame and the payload behind it.
pub(crate) type Sent = (Frame, Vec<u8>);

/// Bytes that differ from place to place.
pub(crate) fn bytes(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + i / 251) as u8 ^ seed).collect()
}

fn described(payload: &[u8]) -> (Flags, Payload) {
    let flags = if payload.is_empty() { Flags::NONE } else { Flags::PAYLOAD_FOLLOWS };
    (flags, Payload { length: payload.len() as u32, crc: crc32c(payload) })
}

pub(crate) fn write(slot: u16, payload: Vec<u8>) -> Sent {
    let (flags, described) = described(&payload);
    let length = described.length.into();
    let command =
        Command { opcode: Opcode::WRITE, flags, slot: Slot(slot), length, payload: described, ..Command::default() };
    (Frame::Command(command), payload)
}

pub(crate) fn reply(slot: u16, payload: Vec<u8>) -> Sent {
    let (flags, described) = described(&payload);
    let reply = Reply {
        opcode: Opcode::READ,
        flags,
        slot: Slot(slot),
        status: Status::OK,
        epoch: Epoch(3),
        sequence: Sequence(4),
        result: 0,
        credits: Credits { granted_slots: 32, data_window: 1 << 20, ..Credits::default() },
        payload: described,
    };
    (Frame::Reply(reply), payload)
}

pub(crate) fn data(slot: u16, payload: Vec<u8>) -> Sent {
    let (_, described) = described(&payload);
    let (opcode, slot) = (Opcode::WRITE, Slot(slot));
    (Frame::Data(Transfer { opcode, slot, epoch: Epoch(3), sequence: Sequence(4), payload: described }), payload)
}

pub(crate) fn probe(token: u64) -> Sent {
    (Frame::Control(Control::new(ControlKind::Probe, Epoch(3), token)), Vec::new())
}

pub(crate) fn disconnect(text: Vec<u8>) -> Sent {
    let (_, payload) = described(&text);
    let control = Control { status: Status::TIMEOUT, payload, ..Control::new(ControlKind::Disconnect, Epoch(3), 0) };
    (Frame::Control(control), text)
}

/// A frame of any kind, with or without payload, small or large.
pub(crate) fn any_frame() -> impl Strategy<Value = Sent> {
    let length = prop_oneof![Just(0usize), 1usize..600, Just(4096usize), 4000usize..20_000, 60_000usize..140_000];
    (0u8..5, any::<u8>(), length).prop_map(|(kind, seed, length)| match kind {
        0 => write(seed.into(), bytes(length, seed)),
        1 => reply(seed.into(), bytes(length, seed)),
        2 => data(seed.into(), bytes(length.max(1), seed)),
        3 => disconnect(bytes(length.min(MAX_TEXT), seed)),
        _ => probe(seed.into()),
    })
}

/// How many bytes each call moves.
pub(crate) fn any_script() -> impl Strategy<Value = Vec<usize>> {
    let step = prop_oneof![Just(0usize), 1usize..200, 1usize..100_000, Just(usize::MAX)];
    // The last step always moves something, or nothing ever would.
    (proptest::collection::vec(step, 0..8), 1usize..70_000).prop_map(|(mut script, last)| {
        script.push(last);
        script
    })
}

/// The frames as one stream.
pub(crate) fn stream_of(frames: &[Sent]) -> Vec<u8> {
    frames.iter().flat_map(|(frame, payload)| frame.encode().into_iter().chain(payload.iter().copied())).collect()
}

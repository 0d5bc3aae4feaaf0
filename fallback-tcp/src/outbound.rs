//! Frames into a byte stream.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use twinrail_protocol::limits::{CONTROL_CREDIT, HEADER_LEN, MAX_CONTROL_PAYLOAD};
use twinrail_protocol::wire::{ControlKind, HeaderBytes};

/// Control frames that may wait to be sent: requests and answers of both sides come to twice
/// [`CONTROL_CREDIT`], and as many again leave room for frames that take no credit.
pub const CONTROL_FRAMES: usize = 4 * CONTROL_CREDIT as usize;

/// Pieces given to the kernel with one call. They stand on the stack, and 128 of them already make the
/// cost of the call small against that of its bytes.
const MAX_SLICES: usize = 128;

/// What frames are sent through: a non-blocking socket, or a test's stand-in for one.
pub trait SendVectored {
    /// Sends the front of `slices`, taken together; gives the number of bytes taken.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when nothing can be taken now; else what the socket says.
    fn send_vectored(&self, slices: &[IoSlice<'_>]) -> io::Result<usize>;
}

/// How far [`Outbound::flush`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushed {
    /// Everything is with the kernel.
    Empty,
    /// The socket is full: flush again when it is writable.
    WouldBlock,
    /// The budget is spent: flush again in the next turn.
    More,
}

/// No room for a frame. The queue is as long as the credits allow, so either its capacity was computed
/// wrongly or the peer doesn't keep to its control credit: the connection ends (I6, I8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room to queue another frame")]
pub struct Full<P> {
    /// The payload, given back.
    pub payload: Option<P>,
}

/// A data frame that waits.
#[derive(Debug)]
struct Data<P> {
    header: HeaderBytes,
    payload: Option<P>,
}

/// A control frame that waits.
#[derive(Debug)]
struct Control {
    header: HeaderBytes,
    /// Bytes of [`Outbound::text`] that follow the header.
    text: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lane {
    Control,
    Data,
}

/// Frames that wait to be sent on one connection, in two lanes: control frames go before data frames (I10),
/// but never into one that is partly sent.
///
/// A payload stays where it is; `P` is the driver's name for it. It is given back when the kernel has
/// taken its last byte (a copy: the buffer is then free), or by [`Self::drain`].
#[derive(Debug)]
pub struct Outbound<P> {
    control: VecDeque<Control>,
    data: VecDeque<Data<P>>,
    capacity: usize,
    /// The text of the one control frame that has one: a DISCONNECT, after which nothing else is sent.
    text: Box<[u8]>,
    /// How much of the first frame was sent; if any, `lane` says where that frame stands.
    sent: usize,
    lane: Lane,
}

impl<P> Outbound<P> {
    /// A queue for up to `capacity` data frames and [`CONTROL_FRAMES`] control frames.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            control: VecDeque::with_capacity(CONTROL_FRAMES),
            data: VecDeque::with_capacity(capacity),
            capacity,
            text: vec![0; MAX_CONTROL_PAYLOAD].into_boxed_slice(),
            sent: 0,
            lane: Lane::Control,
        }
    }

    /// Queues a data frame; `payload` is what its header says will follow.
    ///
    /// # Errors
    /// [`Full`], with the payload.
    pub fn push(&mut self, header: HeaderBytes, payload: Option<P>) -> Result<(), Full<P>> {
        if self.data.len() >= self.capacity {
            return Err(Full { payload });
        }
        self.data.push_back(Data { header, payload });
        Ok(())
    }

    /// Queues a control frame; `text` is what its header says will follow, mostly nothing.
    ///
    /// # Errors
    /// [`Full`]; also when another text waits, or this one is longer than [`MAX_CONTROL_PAYLOAD`].
    pub fn push_control(&mut self, header: HeaderBytes, text: &[u8]) -> Result<(), Full<P>> {
        let text_waits = self.control.iter().any(|c| c.text > 0);
        if self.control.len() >= CONTROL_FRAMES || (text_waits && !text.is_empty()) {
            return Err(Full { payload: None });
        }
        let room = self.text.get_mut(..text.len()).ok_or(Full { payload: None })?;
        room.copy_from_slice(text);
        self.control.push_back(Control { header, text: text.len() });
        Ok(())
    }

    /// Whether nothing waits.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.control.is_empty() && self.data.is_empty()
    }

    /// Frames that wait, one that is partly sent included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.control.len() + self.data.len()
    }

    /// Answers to control requests that aren't wholly with the kernel: the peer can't have them yet.
    #[must_use]
    pub fn answers_waiting(&self) -> usize {
        let kinds = self.control.iter().filter_map(|c| ControlKind::from_number(c.header[0]));
        kinds.filter(|kind| kind.is_answer()).count()
    }

    /// Sends what waits: until there is nothing, the socket is full, or `budget` bytes are gone, so that one
    /// connection cannot keep its thread from the others.
    ///
    /// `resolve` says where a payload lies, the same for every call while it waits; `sent` takes it back.
    /// When the socket takes less than offered it is full, and isn't asked again to say so.
    ///
    /// # Errors
    /// What the socket says: the connection is lost.
    pub fn flush<'a, S: SendVectored + ?Sized>(
        &mut self,
        socket: &S,
        budget: usize,
        resolve: impl Fn(&P) -> &'a [u8],
        mut sent: impl FnMut(P),
    ) -> io::Result<Flushed> {
        let mut left = budget;
        while !self.is_empty() {
            if left == 0 {
                return Ok(Flushed::More);
            }
            let mut slices = [IoSlice::new(&[]); MAX_SLICES];
            let (count, offered) = self.gather(&mut slices, left, &resolve);
            let taken = match socket.send_vectored(&slices[..count]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(taken) => taken.min(offered),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Flushed::WouldBlock),
                Err(e) => return Err(e),
            };
            self.advance(taken, &resolve, &mut sent);
            if taken < offered {
                return Ok(Flushed::WouldBlock);
            }
            left -= taken;
        }
        Ok(Flushed::Empty)
    }

    /// Gives back every payload and forgets every frame: the path is lost.
    pub fn drain(&mut self, mut back: impl FnMut(P)) {
        self.control.clear();
        self.sent = 0;
        while let Some(frame) = self.data.pop_front() {
            frame.payload.map(&mut back);
        }
    }

    /// Collects up to `limit` bytes of what is to be sent next; gives the number of slices and of bytes.
    fn gather<'s, 'a: 's>(
        &'s self,
        slices: &mut [IoSlice<'s>; MAX_SLICES],
        limit: usize,
        resolve: &impl Fn(&P) -> &'a [u8],
    ) -> (usize, usize) {
        let begun = usize::from(self.sent > 0 && self.lane == Lane::Data);
        let data = |frame: &'s Data<P>| [&frame.header[..], frame.payload.as_ref().map_or(&[], resolve)];
        let control = |frame: &'s Control| [&frame.header[..], &self.text[..frame.text]];
        let frames = self.data.iter().take(begun).map(data);
        let frames = frames.chain(self.control.iter().map(control));
        let frames = frames.chain(self.data.iter().skip(begun).map(data));

        let (mut gone, mut count, mut bytes) = (self.sent, 0, 0);
        for part in frames.flatten() {
            let rest = &part[gone.min(part.len())..];
            gone -= part.len() - rest.len();
            let rest = &rest[..rest.len().min(limit - bytes)];
            if rest.is_empty() {
                continue;
            }
            slices[count] = IoSlice::new(rest);
            count += 1;
            bytes += rest.len();
            if count == MAX_SLICES || bytes == limit {
                break;
            }
        }
        (count, bytes)
    }

    /// Removes `taken` bytes from the front, in the order in which they were gathered.
    fn advance<'a>(&mut self, mut taken: usize, resolve: &impl Fn(&P) -> &'a [u8], sent: &mut impl FnMut(P)) {
        while taken > 0 {
            if self.sent == 0 {
                self.lane = if self.control.is_empty() { Lane::Data } else { Lane::Control };
            }
            let payload = match self.lane {
                Lane::Control => self.control.front().map_or(0, |frame| frame.text),
                Lane::Data => self.data.front().and_then(|f| f.payload.as_ref()).map_or(0, |p| resolve(p).len()),
            };
            let left = HEADER_LEN + payload - self.sent;
            if taken < left {
                self.sent += taken;
                return;
            }
            taken -= left;
            self.sent = 0;
            match self.lane {
                Lane::Control => drop(self.control.pop_front()),
                Lane::Data => {
                    self.data.pop_front().and_then(|frame| frame.payload).map(&mut *sent);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripted::{Scripted, Sent, any_frame, any_script, bytes, disconnect, probe, reply, stream_of};
    use proptest::prelude::*;
    use twinrail_protocol::Epoch;
    use twinrail_protocol::wire::{self, Frame};

    /// Queues the frame whose payload has number `index` in the tests' arena.
    fn queue(outbound: &mut Outbound<usize>, index: usize, (frame, payload): &Sent) -> Result<(), Full<usize>> {
        match frame {
            Frame::Control(_) => outbound.push_control(frame.encode(), payload),
            _ => outbound.push(frame.encode(), (!payload.is_empty()).then_some(index)),
        }
    }

    #[test]
    fn many_frames_go_with_one_call() {
        let frames: Vec<Sent> = (0..60).map(|i| reply(i, bytes(4096, i as u8))).collect();
        let mut outbound = Outbound::new(60);
        frames.iter().enumerate().for_each(|(i, f)| queue(&mut outbound, i, f).unwrap());
        assert_eq!(outbound.len(), 60);
        let (socket, mut back) = (Scripted::default(), Vec::new());
        let flushed = outbound.flush(&socket, usize::MAX, |i| &frames[*i].1, |i| back.push(i)).unwrap();
        assert_eq!((flushed, socket.calls.get()), (Flushed::Empty, 1));
        assert!(outbound.is_empty() && back.iter().copied().eq(0..60));
        assert!(socket.stream.take().into_iter().eq(stream_of(&frames)));
    }

    #[test]
    fn control_overtakes_data_but_never_splits_a_frame() {
        let frames = [reply(0, bytes(9000, 0)), reply(1, bytes(9000, 1)), probe(2), probe(3)];
        let mut outbound = Outbound::new(4);
        let socket = Scripted::new([], &[100, usize::MAX]);
        let flush =
            |outbound: &mut Outbound<usize>| outbound.flush(&socket, usize::MAX, |i| &frames[*i].1, drop).unwrap();
        queue(&mut outbound, 0, &frames[0]).unwrap();
        queue(&mut outbound, 1, &frames[1]).unwrap();
        assert_eq!(flush(&mut outbound), Flushed::WouldBlock);
        queue(&mut outbound, 2, &frames[2]).unwrap();
        queue(&mut outbound, 3, &frames[3]).unwrap();
        assert_eq!(flush(&mut outbound), Flushed::Empty);
        let [a, b, c, d] = frames.clone();
        assert!(socket.stream.take().into_iter().eq(stream_of(&[a, c, d, b])));
    }

    #[test]
    fn a_budget_ends_the_turn() {
        let frame = reply(0, bytes(100_000, 0));
        let mut outbound = Outbound::new(1);
        queue(&mut outbound, 0, &frame).unwrap();
        let socket = Scripted::default();
        assert_eq!(outbound.flush(&socket, 0, |_| &frame.1, drop).unwrap(), Flushed::More);
        assert_eq!(outbound.flush(&socket, 60_000, |_| &frame.1, drop).unwrap(), Flushed::More);
        assert_eq!(socket.stream.borrow().len(), 60_000);
        assert_eq!(outbound.flush(&socket, 60_000, |_| &frame.1, drop).unwrap(), Flushed::Empty);
        assert!(socket.stream.take().into_iter().eq(stream_of(&[frame])));
    }

    #[test]
    fn a_full_queue_gives_the_payload_back_and_keeps_room_for_control() {
        let header = probe(0).0.encode();
        let mut outbound = Outbound::new(2);
        outbound.push(header, Some('a')).unwrap();
        outbound.push(header, None).unwrap();
        assert_eq!(outbound.push(header, Some('b')), Err(Full { payload: Some('b') }));
        for _ in 0..CONTROL_FRAMES - 1 {
            outbound.push_control(header, &[]).unwrap();
        }
        assert!(outbound.push_control(header, &[0; MAX_CONTROL_PAYLOAD + 1]).is_err());
        let (frame, text) = disconnect(bytes(MAX_CONTROL_PAYLOAD, 0));
        outbound.push_control(frame.encode(), &text).unwrap();
        assert!(outbound.push_control(header, &[]).is_err());
    }

    #[test]
    fn i6_an_answer_counts_as_waiting_until_its_last_byte_is_sent() {
        let answer = |kind| Frame::Control(wire::Control::new(kind, Epoch(3), 1)).encode();
        let mut outbound = Outbound::<()>::new(1);
        outbound.push_control(probe(0).0.encode(), &[]).unwrap();
        for kind in [ControlKind::ProbeReply, ControlKind::EventSeen, ControlKind::Closed] {
            outbound.push_control(answer(kind), &[]).unwrap();
        }
        assert_eq!(outbound.answers_waiting(), 3);
        for (taken, waiting) in [(2 * HEADER_LEN - 1, 3), (1, 2), (2 * HEADER_LEN, 0)] {
            let socket = Scripted::new([], &[taken]);
            outbound.flush(&socket, taken, |()| &[], drop).unwrap();
            assert_eq!(outbound.answers_waiting(), waiting);
        }
    }

    #[test]
    fn a_lost_path_gives_every_payload_back() {
        let frames = [reply(0, bytes(9000, 0)), reply(1, Vec::new()), reply(2, bytes(9000, 2)), probe(3)];
        let mut outbound = Outbound::new(4);
        frames.iter().enumerate().for_each(|(i, f)| queue(&mut outbound, i, f).unwrap());
        // The probe and part of the first reply are sent.
        let flushed = outbound.flush(&Scripted::new([], &[5000]), usize::MAX, |i| &frames[*i].1, drop);
        assert_eq!(flushed.unwrap(), Flushed::WouldBlock);
        let mut back = Vec::new();
        outbound.drain(|i| back.push(i));
        assert_eq!(back, [0, 2]);
        assert!(outbound.is_empty());
        // It is as good as new.
        let socket = Scripted::default();
        queue(&mut outbound, 0, &frames[0]).unwrap();
        outbound.flush(&socket, usize::MAX, |i| &frames[*i].1, drop).unwrap();
        assert!(socket.stream.take().into_iter().eq(stream_of(&frames[..1])));
    }

    #[test]
    fn a_socket_that_takes_nothing_is_lost() {
        struct Deaf;
        impl SendVectored for Deaf {
            fn send_vectored(&self, _: &[IoSlice<'_>]) -> io::Result<usize> {
                Ok(0)
            }
        }
        let mut outbound = Outbound::<()>::new(1);
        outbound.push(probe(0).0.encode(), None).unwrap();
        assert_eq!(outbound.flush(&Deaf, 1, |()| &[], drop).unwrap_err().kind(), io::ErrorKind::WriteZero);
    }

    proptest! {
        /// However the socket takes the bytes and whenever frames are queued: each lane's frames come out
        /// whole and in order, and every payload is given back once.
        #[test]
        fn any_partial_sends_give_the_same_frames(
            frames in proptest::collection::vec((any_frame(), any::<bool>()), 0..24),
            script in any_script(),
            budget in 1usize..100_000,
        ) {
            let socket = Scripted::new([], &script);
            let mut outbound = Outbound::new(24);
            let (mut sent, mut back) = (Vec::new(), Vec::new());
            let mut flush = |outbound: &mut Outbound<usize>| {
                outbound.flush(&socket, budget, |i| &frames[*i].0.1[..], |i| back.push(i)).unwrap()
            };
            for (i, (frame, flush_now)) in frames.iter().enumerate() {
                match queue(&mut outbound, i, frame) {
                    Ok(()) => sent.push(frame.clone()),
                    // One text at a time.
                    Err(full) => prop_assert!(matches!(frame.0, Frame::Control(_)) && full.payload.is_none()),
                }
                if *flush_now {
                    flush(&mut outbound);
                }
            }
            while flush(&mut outbound) != Flushed::Empty {}

            let mut stream = socket.stream.take();
            let mut seen = Vec::new();
            while !stream.is_empty() {
                let header: Vec<u8> = stream.drain(..HEADER_LEN).collect();
                let frame = Frame::decode(&header.try_into().unwrap()).unwrap();
                seen.push((frame, stream.drain(..frame.following() as usize).collect::<Vec<u8>>()));
            }
            let is_control = |(frame, _): &Sent| matches!(frame, Frame::Control(_));
            let (control, data): (Vec<Sent>, Vec<Sent>) = seen.into_iter().partition(is_control);
            let (sent_control, sent_data): (Vec<Sent>, Vec<Sent>) = sent.into_iter().partition(is_control);
            prop_assert_eq!(control, sent_control);
            prop_assert_eq!(data, sent_data);
            let payloads = |(i, (sent, _)): (usize, &(Sent, bool))| {
                (!is_control(sent) && !sent.1.is_empty()).then_some(i)
            };
            prop_assert!(back.into_iter().eq(frames.iter().enumerate().filter_map(payloads)));
        }
    }
}

//! Frames out of a byte stream.

use std::io::{self, IoSliceMut};

use twinrail_protocol::crc32c;
use twinrail_protocol::limits::{HEADER_LEN, IN_CAPSULE_RANGE, MAX_CONTROL_PAYLOAD};
use twinrail_protocol::wire::{Fault, Frame, Rail};

/// Length of the staging buffer in bytes: several of the longest frames that are staged whole, and about
/// what one call to the kernel is worth.
const STAGING: usize = 64 * 1024;

/// Small frames in a row after which the next read looks ahead as far as there is room. One stray small
/// frame among large payloads is no reason to have the next payload copied.
const WIDE_AFTER: u32 = 4;

const _: () = {
    assert!(STAGING.is_power_of_two());
    // A frame that is staged whole, and the header after it.
    assert!(2 * HEADER_LEN + *IN_CAPSULE_RANGE.end() as usize <= STAGING);
    assert!(2 * HEADER_LEN + MAX_CONTROL_PAYLOAD <= STAGING);
};

/// What bytes are received from: a non-blocking socket, or a test's stand-in for one.
pub trait ReceiveVectored {
    /// Receives into the front of `slices`, taken together; gives the number of bytes, 0 at the end of the
    /// stream.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when nothing is there now; else what the socket says.
    fn receive_vectored(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize>;
}

/// What [`Inbound::next`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival<'a> {
    /// Nothing that is whole: [`Inbound::fill`] is next.
    Pending,
    /// A frame, with its payload if it brings one.
    Frame {
        /// The header.
        frame: Frame,
        /// [`Frame::following`] bytes. The CRC32C of a control frame's is good; another's is for its
        /// receiver to check, on the buffer where it ends up (I7).
        payload: &'a [u8],
    },
    /// A frame whose payload is to be received elsewhere: [`Inbound::place`] or [`Inbound::skip`] is next.
    /// It is told again until then.
    Large {
        /// The header.
        frame: Frame,
    },
    /// The payload that was being placed is whole. A skipped one isn't told of.
    PayloadComplete,
}

/// What [`Inbound::fill`] got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// Bytes.
    Bytes {
        /// How many.
        count: usize,
        /// There was room for more than came: the socket is empty. A driver that is woken again while
        /// anything is to be read, the end of the stream included, needs no further call to learn it.
        drained: bool,
    },
    /// The socket is empty.
    WouldBlock,
    /// The peer has closed its side; nothing else will come.
    Closed,
    /// Nothing was read, for want of room: what has arrived must be taken with [`Inbound::next`] first, or
    /// an [`Arrival::Large`] answered.
    Full,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// A header comes next.
    Header,
    /// The header came, and its payload is staged whole.
    Staging(Frame),
    /// The header came, and its payload has no place yet.
    Unplaced(Frame),
    /// So much of the payload has yet to come into its place.
    Placing { length: usize, remaining: usize },
    /// So much of the payload has yet to come, and is thrown away.
    Skipping { remaining: usize },
    /// The stream can't be trusted any more.
    Broken(Fault),
}

/// Cuts the bytes of one connection into frames.
///
/// What arrives goes through a staging buffer, except for long payloads, which go where they belong: they
/// are copied out of it only as far as they were read ahead ([`Self::copied_bytes`]).
///
/// How far a read looks ahead depends on what came before. After a large payload it ends with the header
/// that follows, so that a steady stream of large payloads is never copied and costs one call each; after
/// several small frames it takes all there is room for, so that many of them come with one call.
#[derive(Debug)]
pub struct Inbound {
    staging: Box<[u8]>,
    /// What is staged: `staging[head..tail]`.
    head: usize,
    tail: usize,
    state: State,
    direct_above: u32,
    /// Small frames since the last large payload.
    small_run: u32,
    copied_bytes: u64,
}

impl Inbound {
    /// A connection that has delivered nothing yet. Payloads longer than `direct_above`, the agreed
    /// in-capsule size, are placed by the caller; shorter ones and those of control frames are staged.
    #[must_use]
    pub fn new(direct_above: u32) -> Self {
        Self {
            staging: vec![0; STAGING].into_boxed_slice(),
            head: 0,
            tail: 0,
            state: State::Header,
            // More couldn't be staged whole, and isn't ever agreed on.
            direct_above: direct_above.min(*IN_CAPSULE_RANGE.end()),
            small_run: WIDE_AFTER,
            copied_bytes: 0,
        }
    }

    /// The next thing that has arrived whole.
    ///
    /// # Errors
    /// A [`Fault`]: the connection ends with it, and every further call gives it again.
    #[expect(clippy::should_implement_trait, reason = "it lends out the staging buffer, an iterator can't")]
    pub fn next(&mut self) -> Result<Arrival<'_>, Fault> {
        loop {
            match self.state {
                State::Header => {
                    let Some(header) = self.staging[self.head..self.tail].first_chunk() else {
                        return Ok(Arrival::Pending);
                    };
                    let decoded = Frame::decode(header).and_then(|frame| frame.on_rail(Rail::TCP));
                    self.head += HEADER_LEN;
                    self.begin(decoded);
                }
                State::Staging(frame) => {
                    let end = self.head + frame.following() as usize;
                    if end > self.tail {
                        return Ok(Arrival::Pending);
                    }
                    let payload = self.head..end;
                    self.head = end;
                    if matches!(frame, Frame::Control(_))
                        && crc32c(&self.staging[payload.clone()]) != frame.payload().crc
                    {
                        self.state = State::Broken(Fault::ControlCrc);
                        continue;
                    }
                    self.state = State::Header;
                    return Ok(Arrival::Frame { frame, payload: &self.staging[payload] });
                }
                State::Unplaced(frame) => return Ok(Arrival::Large { frame }),
                State::Placing { remaining: 0, .. } => {
                    self.state = State::Header;
                    return Ok(Arrival::PayloadComplete);
                }
                State::Placing { .. } => return Ok(Arrival::Pending),
                State::Skipping { remaining } => {
                    let dropped = remaining.min(self.tail - self.head);
                    self.head += dropped;
                    if dropped < remaining {
                        self.state = State::Skipping { remaining: remaining - dropped };
                        return Ok(Arrival::Pending);
                    }
                    self.state = State::Header;
                }
                State::Broken(fault) => return Err(fault),
            }
        }
    }

    /// Decides what becomes of the payload behind a header.
    fn begin(&mut self, decoded: Result<Frame, Fault>) {
        self.state = match decoded {
            Err(fault) => State::Broken(fault),
            // Version 1 has no handshake inside an activated connection.
            Ok(Frame::Handshake { kind, .. }) => State::Broken(Fault::UnexpectedKind(kind)),
            Ok(frame) if frame.following() > self.direct_above && !matches!(frame, Frame::Control(_)) => {
                self.small_run = 0;
                State::Unplaced(frame)
            }
            Ok(frame) => {
                self.small_run = self.small_run.saturating_add(1);
                State::Staging(frame)
            }
        };
    }

    /// Answers [`Arrival::Large`]: the payload is received into `destination`, of [`Frame::following`]
    /// bytes. What is already staged is copied there; for the rest `destination` is given to every
    /// [`Self::fill`] until [`Arrival::PayloadComplete`].
    ///
    /// A destination of another length breaks the connection: [`Self::next`] then gives a [`Fault`].
    pub fn place(&mut self, destination: &mut [u8]) {
        let State::Unplaced(frame) = self.state else {
            debug_assert!(false, "no payload waits for a place");
            return;
        };
        let length = frame.following() as usize;
        if destination.len() != length {
            self.state = State::Broken(Fault::Malformed("a payload doesn't fit the buffer meant for it"));
            return;
        }
        let staged = length.min(self.tail - self.head);
        destination[..staged].copy_from_slice(&self.staging[self.head..self.head + staged]);
        self.head += staged;
        self.copied_bytes += staged as u64;
        self.state = State::Placing { length, remaining: length - staged };
    }

    /// Answers [`Arrival::Large`], or gives up a payload that is being placed: what is still to come of it
    /// is thrown away.
    pub fn skip(&mut self) {
        match self.state {
            State::Unplaced(frame) => self.state = State::Skipping { remaining: frame.following() as usize },
            State::Placing { remaining, .. } => self.state = State::Skipping { remaining },
            _ => debug_assert!(false, "no payload waits for a place, or is being placed"),
        }
    }

    /// Whether [`Self::fill`] needs the destination of the payload that is being placed.
    #[inline]
    #[must_use]
    pub fn wants_destination(&self) -> bool {
        self.remaining() > 0
    }

    /// Bytes still to come of the payload that is being placed.
    #[inline]
    #[must_use]
    pub fn remaining(&self) -> usize {
        match self.state {
            State::Placing { remaining, .. } => remaining,
            _ => 0,
        }
    }

    /// Bytes of large payloads that were read ahead and copied out of the staging buffer: a metric.
    #[inline]
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// Receives once, first into what is left of `destination` (the whole one that was given to
    /// [`Self::place`]; empty unless [`Self::wants_destination`]), then ahead into the staging buffer.
    /// An interrupted call is repeated.
    ///
    /// # Errors
    /// What the socket says: the connection is lost. [`io::ErrorKind::InvalidInput`] when `destination` has
    /// another length than the one that was placed.
    pub fn fill<S: ReceiveVectored + ?Sized>(&mut self, socket: &S, destination: &mut [u8]) -> io::Result<Filled> {
        let direct: &mut [u8] = match self.state {
            State::Placing { length, remaining } => match destination.len() == length {
                true => &mut destination[length - remaining..],
                false => return Err(io::ErrorKind::InvalidInput.into()),
            },
            // To read further would only make more to copy.
            State::Unplaced(_) | State::Broken(_) => return Ok(Filled::Full),
            _ => &mut [],
        };
        // The caller takes what is whole before it fills: at most part of one small frame is moved.
        self.staging.copy_within(self.head..self.tail, 0);
        (self.head, self.tail) = (0, self.tail - self.head);
        let room = STAGING - self.tail;
        let ahead = if self.small_run < WIDE_AFTER { room.min(self.missing()) } else { room };

        let directly = direct.len();
        let wanted = directly + ahead;
        if wanted == 0 {
            return Ok(Filled::Full);
        }
        let staged = IoSliceMut::new(&mut self.staging[self.tail..self.tail + ahead]);
        let mut slices = [IoSliceMut::new(direct), staged];
        let slices = if directly == 0 { &mut slices[1..] } else { &mut slices[..] };
        let count = loop {
            match socket.receive_vectored(slices) {
                Ok(0) => return Ok(Filled::Closed),
                Ok(count) => break count.min(wanted),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Filled::WouldBlock),
                Err(e) => return Err(e),
            }
        };
        let placed = count.min(directly);
        if let State::Placing { remaining, .. } = &mut self.state {
            *remaining -= placed;
        }
        self.tail += count - placed;
        Ok(Filled::Bytes { count, drained: count < wanted })
    }

    /// Bytes that the staging buffer lacks until the current frame is whole and the next header is there.
    fn missing(&self) -> usize {
        let frame = match self.state {
            State::Staging(frame) => frame.following() as usize,
            State::Skipping { remaining } => remaining,
            _ => 0,
        };
        (frame + HEADER_LEN).saturating_sub(self.tail - self.head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripted::{Scripted, Sent, any_frame, any_script, bytes, disconnect, probe, reply, stream_of, write};
    use proptest::prelude::*;
    use std::cell::Cell;
    use twinrail_protocol::limits::DEFAULT_IN_CAPSULE;
    use twinrail_protocol::wire::Payload;

    /// Receives until the stream ends, as a driver does; skips the large payloads that `skips` names.
    fn receive(
        inbound: &mut Inbound,
        socket: &Scripted,
        mut skips: impl FnMut(&Frame) -> bool,
    ) -> Result<Vec<Sent>, Fault> {
        let (mut seen, mut destination) = (Vec::new(), Vec::new());
        loop {
            match inbound.next()? {
                Arrival::Frame { frame, payload } => seen.push((frame, payload.to_vec())),
                Arrival::Large { frame } if skips(&frame) => {
                    inbound.skip();
                    seen.push((frame, Vec::new()));
                }
                Arrival::Large { frame } => {
                    destination = vec![0; frame.following() as usize];
                    inbound.place(&mut destination);
                    seen.push((frame, Vec::new()));
                }
                Arrival::PayloadComplete => seen.last_mut().unwrap().1 = std::mem::take(&mut destination),
                Arrival::Pending => match inbound.fill(socket, &mut destination).unwrap() {
                    Filled::Bytes { .. } | Filled::WouldBlock => {}
                    Filled::Closed => return Ok(seen),
                    Filled::Full => panic!("no room although everything was taken"),
                },
            }
        }
    }

    fn all(frames: &[Sent]) -> Result<Vec<Sent>, Fault> {
        receive(&mut Inbound::new(DEFAULT_IN_CAPSULE), &Scripted::new(stream_of(frames), &[]), |_| false)
    }

    #[test]
    fn a_steady_stream_of_large_payloads_is_never_copied_and_costs_one_call_each() {
        let frames: Vec<Sent> = (0..64).map(|i| write(i, bytes(128 * 1024, i as u8))).collect();
        let socket = Scripted::new(stream_of(&frames), &[]);
        let mut inbound = Inbound::new(DEFAULT_IN_CAPSULE);
        assert_eq!(receive(&mut inbound, &socket, |_| false).unwrap(), frames);
        // Only the first read could not know what comes.
        assert!(inbound.copied_bytes() <= STAGING as u64);
        assert_eq!(socket.calls.get(), 64 + 2);

        let (before, socket) = (inbound.copied_bytes(), Scripted::new(stream_of(&frames), &[1448, 9000, 0, 65536]));
        assert_eq!(receive(&mut inbound, &socket, |_| false).unwrap(), frames);
        assert_eq!(inbound.copied_bytes(), before);
    }

    #[test]
    fn a_stray_small_frame_among_large_payloads_causes_no_copy() {
        let mut frames = vec![write(0, bytes(65_536, 0))];
        for i in 0..32 {
            frames.extend([probe(i), write(1, bytes(512, 1)), write(2, bytes(131_072, 2))]);
        }
        let socket = Scripted::new(stream_of(&frames), &[]);
        let mut inbound = Inbound::new(DEFAULT_IN_CAPSULE);
        assert_eq!(receive(&mut inbound, &socket, |_| false).unwrap(), frames);
        assert!(inbound.copied_bytes() <= STAGING as u64);
    }

    #[test]
    fn many_small_frames_come_with_one_call() {
        let frames: Vec<Sent> = (0..1000).map(|i| reply(i, Vec::new())).collect();
        let socket = Scripted::new(stream_of(&frames), &[]);
        assert_eq!(receive(&mut Inbound::new(DEFAULT_IN_CAPSULE), &socket, |_| false).unwrap(), frames);
        assert_eq!(socket.calls.get(), 2);
    }

    #[test]
    fn a_large_payload_is_told_until_it_has_a_place_and_nothing_is_read_meanwhile() {
        let (frame, payload) = write(1, bytes(100_000, 9));
        let socket = Scripted::new(stream_of(&[(frame, payload.clone())]), &[]);
        let mut inbound = Inbound::new(DEFAULT_IN_CAPSULE);
        assert_eq!(inbound.next(), Ok(Arrival::Pending));
        assert!(matches!(inbound.fill(&socket, &mut []), Ok(Filled::Bytes { drained: false, .. })));
        for _ in 0..2 {
            assert_eq!(inbound.next(), Ok(Arrival::Large { frame }));
            assert_eq!(inbound.fill(&socket, &mut []).unwrap(), Filled::Full);
        }
        let mut destination = vec![0; 100_000];
        inbound.place(&mut destination);
        assert!(inbound.wants_destination());
        assert_eq!(inbound.fill(&socket, &mut []).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let count = inbound.remaining();
        assert_eq!(inbound.fill(&socket, &mut destination).unwrap(), Filled::Bytes { count, drained: true });
        assert!(!inbound.wants_destination());
        assert_eq!(inbound.next(), Ok(Arrival::PayloadComplete));
        assert_eq!(destination, payload);
        assert_eq!(inbound.fill(&socket, &mut []).unwrap(), Filled::Closed);
    }

    #[test]
    fn a_place_of_another_length_breaks_the_connection() {
        let mut inbound = Inbound::new(DEFAULT_IN_CAPSULE);
        inbound.fill(&Scripted::new(stream_of(&[write(1, bytes(9000, 0))]), &[]), &mut []).unwrap();
        assert!(matches!(inbound.next(), Ok(Arrival::Large { .. })));
        inbound.place(&mut [0; 8999]);
        assert!(matches!(inbound.next(), Err(Fault::Malformed(_))));
    }

    #[test]
    fn a_payload_may_be_given_up_while_it_comes() {
        let frames = [write(1, bytes(200_000, 0)), probe(7)];
        let socket = Scripted::new(stream_of(&frames), &[70_000]);
        let (mut inbound, mut destination) = (Inbound::new(DEFAULT_IN_CAPSULE), vec![0; 200_000]);
        inbound.fill(&socket, &mut []).unwrap();
        assert!(matches!(inbound.next(), Ok(Arrival::Large { .. })));
        inbound.place(&mut destination);
        inbound.fill(&socket, &mut destination).unwrap();
        inbound.skip();
        assert!(!inbound.wants_destination());
        assert_eq!(receive(&mut inbound, &socket, |_| false).unwrap(), frames[1..]);
    }

    #[test]
    fn a_full_staging_buffer_says_so() {
        let frames: Vec<Sent> = (0..2000).map(probe).collect();
        let socket = Scripted::new(stream_of(&frames), &[]);
        let mut inbound = Inbound::new(DEFAULT_IN_CAPSULE);
        assert!(matches!(inbound.fill(&socket, &mut []), Ok(Filled::Bytes { count: STAGING, drained: false })));
        assert_eq!(inbound.fill(&socket, &mut []).unwrap(), Filled::Full);
        assert_eq!(receive(&mut inbound, &socket, |_| false).unwrap(), frames);
    }

    #[test]
    fn an_interrupted_call_is_repeated() {
        struct Interrupted(Cell<bool>);
        impl ReceiveVectored for Interrupted {
            fn receive_vectored(&self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                match self.0.replace(false) {
                    true => Err(io::ErrorKind::Interrupted.into()),
                    false => Ok(slices.iter().map(|s| s.len()).sum()),
                }
            }
        }
        let filled = Inbound::new(0).fill(&Interrupted(Cell::new(true)), &mut []).unwrap();
        assert_eq!(filled, Filled::Bytes { count: STAGING, drained: false });
    }

    #[test]
    fn a_broken_stream_ends_with_its_fault_and_stays_broken() {
        let frames = [probe(1), write(2, bytes(600, 2))];
        let mut stream = stream_of(&frames);
        stream[HEADER_LEN + 3] ^= 1;
        let socket = Scripted::new(stream, &[]);
        let mut inbound = Inbound::new(DEFAULT_IN_CAPSULE);
        inbound.fill(&socket, &mut []).unwrap();
        assert!(matches!(inbound.next(), Ok(Arrival::Frame { .. })));
        for _ in 0..2 {
            assert_eq!(inbound.next(), Err(Fault::HeaderCrc));
            assert_eq!(inbound.fill(&socket, &mut []).unwrap(), Filled::Full);
        }
    }

    #[test]
    fn what_does_not_belong_here_is_refused() {
        let (frame, text) = disconnect(b"lease is over".to_vec());
        let mut damaged = text.clone();
        damaged[0] ^= 1;
        assert_eq!(all(&[(frame, text.clone())]), Ok(vec![(frame, text)]));
        assert_eq!(all(&[(frame, damaged)]), Err(Fault::ControlCrc));

        let payload = Payload { length: 18_000, crc: 0 };
        assert_eq!(all(&[(Frame::Handshake { kind: 0x45, payload }, Vec::new())]), Err(Fault::UnexpectedKind(0x45)));

        let (Frame::Command(mut command), _) = write(1, bytes(1, 0)) else { unreachable!() };
        command.placement.address = 4096;
        assert!(matches!(all(&[(Frame::Command(command), Vec::new())]), Err(Fault::Malformed(_))), "placed on TCP");
        command.placement.address = 0;
        command.payload.length = u32::MAX;
        assert!(matches!(all(&[(Frame::Command(command), Vec::new())]), Err(Fault::Malformed(_))));
        let (Frame::Control(mut control), _) = disconnect(bytes(1, 0)) else { unreachable!() };
        control.payload.length = MAX_CONTROL_PAYLOAD as u32 + 1;
        assert!(matches!(all(&[(Frame::Control(control), Vec::new())]), Err(Fault::Malformed(_))));
    }

    proptest! {
        /// However a stream is chopped, the same frames and payloads come out.
        #[test]
        fn any_chopping_gives_the_same_frames(
            frames in proptest::collection::vec(any_frame(), 0..12),
            script in any_script(),
            in_capsule in prop_oneof![Just(0u32), Just(DEFAULT_IN_CAPSULE), Just(16_384u32), Just(u32::MAX)],
        ) {
            let socket = Scripted::new(stream_of(&frames), &script);
            let seen = receive(&mut Inbound::new(in_capsule), &socket, |_| false);
            prop_assert_eq!(seen, Ok(frames));
        }

        /// A skipped payload takes nothing of its neighbours along.
        #[test]
        fn any_payload_may_be_skipped(
            frames in proptest::collection::vec((any_frame(), any::<bool>()), 0..12),
            script in any_script(),
        ) {
            let sent: Vec<Sent> = frames.iter().map(|(frame, _)| frame.clone()).collect();
            let socket = Scripted::new(stream_of(&sent), &script);
            let mut wish = frames.iter().filter(|((f, _), _)| f.following() > DEFAULT_IN_CAPSULE).map(|(_, skip)| *skip);
            let seen = receive(&mut Inbound::new(DEFAULT_IN_CAPSULE), &socket, |_| wish.next().unwrap());
            let kept = frames.into_iter().map(|((frame, payload), skip)| {
                let gone = skip && frame.following() > DEFAULT_IN_CAPSULE;
                (frame, if gone { Vec::new() } else { payload })
            });
            prop_assert_eq!(seen, Ok(kept.collect::<Vec<_>>()));
        }

        /// I9: bytes of a peer give frames or a fault, whatever they are. Good headers stand among them, or
        /// no more than the first header would ever be looked at.
        #[test]
        fn no_bytes_can_cause_a_panic(
            pieces in proptest::collection::vec(
                prop_oneof![
                    any_frame().prop_map(|(frame, _)| frame.encode().to_vec()),
                    any_frame().prop_map(|frame| stream_of(&[frame])),
                    proptest::collection::vec(any::<u8>(), 0..300),
                ],
                0..6,
            ),
            script in any_script(),
        ) {
            let socket = Scripted::new(pieces.concat(), &script);
            let _ = receive(&mut Inbound::new(DEFAULT_IN_CAPSULE), &socket, |frame| frame.payload().crc & 1 == 0);
        }
    }
}

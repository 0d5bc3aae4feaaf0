//! Each rule by a small story. `Target` plays the driver: it stores, ends and answers when the test says so.

use alloc::format;
use alloc::string::ToString;
use alloc::vec;

use super::*;
use crate::ids::Secret;
use crate::target::FlushLedger;
use crate::wire::{Attach, AttachFlags};

const X: AttachMode = AttachMode::EXCLUSIVE;
const S: AttachMode = AttachMode::SHARED;
const R: AttachMode = AttachMode::READ_ONLY;
const BOOT: BootId = BootId([0xb0; 16]);
const LIMITS: Limits = Limits {
    max_sessions: 8,
    max_queues: 4,
    max_paths: 16,
    lease_ms: 60_000,
    first_path_ms: 5_000,
    attach_wait_ms: 30_000,
};

fn id(n: u8) -> SessionId {
    SessionId([n; 16])
}

fn digest(n: u8) -> Digest {
    Digest([n; 32])
}

fn hash(secret: &Secret) -> Digest {
    Digest([secret.0[0]; 32])
}

fn request(n: u8, mode: AttachMode) -> Attach<'static> {
    Attach {
        session: id(n),
        secret: Secret([n; 16]),
        next_secret: Secret([0; 16]),
        mode,
        flags: AttachFlags::default(),
        queues: 2,
        expected_volume: VolumeId::NIL,
        generation: 0,
        volume: "",
    }
}

fn preempt(n: u8, mode: AttachMode) -> Attach<'static> {
    Attach { flags: AttachFlags::PREEMPT, ..request(n, mode) }
}

/// A successor of session `n` shows secret `secret` and brings `next`.
fn takeover(n: u8, mode: AttachMode, secret: u8, next: u8) -> Attach<'static> {
    let (secret, next_secret) = (Secret([secret; 16]), Secret([next; 16]));
    Attach { flags: AttachFlags::TAKEOVER, secret, next_secret, ..request(n, mode) }
}

fn facts(n: u8) -> VolumeFacts {
    VolumeFacts { id: VolumeId([n; 16]), read_only: false, write_through: false, record: None }
}

/// Two volumes, the second one read-only.
struct Target {
    holdings: Holdings,
    now_ms: u64,
    requests: u64,
    /// What a disk has of each volume; nothing is stored while `disk_hangs`.
    state: [Option<Record>; 2],
    disk_hangs: bool,
    to_store: Vec<(usize, Record)>,
    ends: Vec<(SessionId, Status)>,
    answers: BTreeMap<u64, Result<Admitted, Refusal>>,
}

impl Target {
    fn new() -> Self {
        Self::start([None, None], BOOT, LIMITS)
    }

    fn start(state: [Option<Record>; 2], boot_id: BootId, limits: Limits) -> Self {
        let volumes = [
            VolumeFacts { record: state[0].clone(), ..facts(1) },
            VolumeFacts { record: state[1].clone(), read_only: true, ..facts(2) },
        ];
        Self {
            holdings: Holdings::new(volumes, boot_id, limits, 0),
            now_ms: 0,
            requests: 0,
            state,
            disk_hangs: false,
            to_store: vec![],
            ends: vec![],
            answers: BTreeMap::new(),
        }
    }

    /// The process ends, now; another one starts from what was stored.
    fn restart(self, boot_id: BootId) -> Self {
        Self::start(self.state, boot_id, LIMITS)
    }

    fn drive(&mut self) {
        while let Some(output) = self.holdings.poll() {
            match output {
                Output::Store { volume, record } => self.to_store.push((volume, record)),
                Output::End { session, status } => self.ends.push((session, status)),
                Output::Answer { request, answer } => {
                    assert_eq!(self.answers.insert(request.0, answer), None, "answered twice");
                }
            }
            if !self.disk_hangs {
                self.store();
            }
        }
    }

    fn store(&mut self) {
        for (volume, record) in core::mem::take(&mut self.to_store) {
            let version = record.version;
            self.state[volume] = Some(record);
            self.holdings.stored(volume, version, self.now_ms);
        }
    }

    /// Sends an ATTACH; gives its number.
    fn send(&mut self, attach: &Attach<'_>) -> u64 {
        self.send_to(0, attach)
    }

    fn send_to(&mut self, volume: usize, attach: &Attach<'_>) -> u64 {
        self.requests += 1;
        let name = format!("host-{}", attach.session.0[0]);
        let asking = Asking::new(RequestId(self.requests), &name, volume, attach, hash).unwrap();
        self.holdings.attach(asking, self.now_ms);
        self.drive();
        self.requests
    }

    fn waits(&self, request: u64) -> bool {
        !self.answers.contains_key(&request)
    }

    fn attach(&mut self, attach: &Attach<'_>) -> Result<Admitted, Refusal> {
        let request = self.send(attach);
        self.answers.get(&request).expect("it waits").clone()
    }

    fn take(&mut self, n: u8, mode: AttachMode) -> Admitted {
        self.attach(&request(n, mode)).unwrap()
    }

    fn status(&mut self, attach: &Attach<'_>) -> Status {
        self.attach(attach).unwrap_err().status()
    }

    fn join(&mut self, n: u8, secret: u8, path: u64) -> Result<(), Status> {
        self.holdings
            .join(id(n), &digest(secret), QueueId(0), PathId(path))
            .map(drop)
            .map_err(|refusal| refusal.status())
    }

    fn ended(&mut self, n: u8) {
        self.ended_with(n, None);
    }

    fn ended_with(&mut self, n: u8, flushed: Option<u64>) {
        self.holdings.ended(id(n), flushed, self.now_ms);
        self.drive();
    }

    /// A session goes in order and all of it.
    fn close(&mut self, n: u8) {
        self.holdings.close(id(n));
        self.drive();
        assert_eq!(self.ends.pop(), Some((id(n), Status::CLOSED)));
        self.ended(n);
    }

    /// Lets the lease of a session that had a path run out, and its end be confirmed.
    fn lose(&mut self, n: u8) {
        self.lease_over(n);
        self.ended(n);
    }

    fn lease_over(&mut self, n: u8) {
        // All others have paths.
        for other in self.holdings.sessions.keys().map(|id| id.0[0]).filter(|other| *other != n).collect::<Vec<_>>() {
            self.join(other, self.secret_of(other), 2000 + u64::from(other)).unwrap();
        }
        self.join(n, self.secret_of(n), 1000).unwrap();
        self.holdings.path_lost(id(n), PathId(1000), self.now_ms);
        self.pass(u64::from(LIMITS.lease_ms));
        assert_eq!(self.ends.pop(), Some((id(n), Status::CONNECTION_LOST)));
    }

    fn secret_of(&self, n: u8) -> u8 {
        self.holdings.sessions[&id(n)].secret.0[0]
    }

    fn pass(&mut self, ms: u64) {
        self.now_ms += ms;
        self.holdings.tick(self.now_ms);
        self.drive();
    }

    fn generation(&self) -> u64 {
        self.holdings.record(0).unwrap().generation
    }
}

// ---- holders

#[test]
fn a_writer_that_does_not_fit_is_refused_with_the_holders() {
    let mut t = Target::new();
    t.take(1, X);
    let refusal = t.attach(&request(2, X)).unwrap_err();
    assert_eq!(refusal.status(), Status::VOLUME_HELD);
    assert!(refusal.to_string().contains("\"host-1\" (exclusive)"), "{refusal}");
    assert_eq!(t.status(&request(2, S)), Status::VOLUME_HELD);
    t.take(3, R);
    t.take(4, R);
    assert_eq!((t.holdings.count(X), t.holdings.count(R)), (1, 2));
}

#[test]
fn a_volume_that_is_not_what_was_expected_is_refused() {
    let mut t = Target::new();
    let other = Attach { expected_volume: VolumeId([9; 16]), ..request(1, X) };
    assert_eq!(t.status(&other), Status::WRONG_VOLUME);
    t.attach(&Attach { expected_volume: VolumeId([1; 16]), ..request(1, X) }).unwrap();
    let read_only = t.send_to(1, &request(2, S));
    assert_eq!(t.answers[&read_only], Err(Refusal::VolumeReadOnly));
    let nowhere = t.send_to(2, &request(2, S));
    assert_eq!(t.answers[&nowhere], Err(Refusal::NoVolume));
}

#[test]
fn a_record_of_another_uuid_says_nothing_of_this_volume() {
    let mut t = Target::new();
    t.take(1, X);
    let mut state = t.state;
    state[0].as_mut().unwrap().volume = VolumeId([9; 16]);
    let mut t = Target::start(state, BOOT, LIMITS);
    assert_eq!(t.generation(), 0);
    // The old holder expects the old volume.
    let back = Attach { generation: 1, expected_volume: VolumeId([9; 16]), ..request(1, X) };
    assert_eq!(t.status(&back), Status::WRONG_VOLUME);
    t.take(2, X);
}

#[test]
fn limits_hold_and_a_preempt_does_not_get_around_them() {
    let limits = Limits { max_sessions: 2, max_paths: 1, ..LIMITS };
    let mut t = Target::start([None, None], BOOT, limits);
    t.take(1, X);
    t.take(2, R);
    assert_eq!(t.status(&request(3, R)), Status::LIMIT_REACHED);
    let taker = t.send(&preempt(3, X));
    assert!(t.waits(taker), "it takes the place of the one that it ends");
    assert_eq!(t.status(&request(4, R)), Status::LIMIT_REACHED);
    t.ended(1);
    t.join(3, 3, 1).unwrap();
    assert_eq!(t.join(2, 2, 2), Err(Status::LIMIT_REACHED));
    t.holdings.path_lost(id(3), PathId(1), 0);
    t.join(2, 2, 2).unwrap();
    let many = Attach { queues: 999, ..request(2, R) };
    assert_eq!(t.attach(&many).unwrap().queues, 2, "as at first");
}

#[test]
fn i8_standbys_of_one_session_kept_the_paths_of_others_out() {
    let mut t = Target::start([None, None], BOOT, Limits { max_paths: 4, ..LIMITS });
    t.take(1, X);
    t.take(2, R);
    let stand_by = |t: &mut Target, n: u8, queue: u16, path: u64| {
        let leaves = t.holdings.stand_by(id(n), &digest(n), QueueId(queue), Rail::TCP, PathId(path));
        let leaves = leaves.map_err(|refusal| refusal.status())?;
        if let Some((session, path)) = leaves {
            t.holdings.path_failed(session, path, 0);
        }
        Ok(leaves)
    };
    t.join(2, 2, 1).unwrap();
    t.holdings.path_lost(id(2), PathId(1), 0);
    assert_eq!([10, 11].map(|path| stand_by(&mut t, 1, 0, path)), [Ok(None); 2]);
    for path in 12..1000 {
        assert_eq!(stand_by(&mut t, 1, 0, path), Ok(Some((id(1), PathId(path - 2)))), "the oldest leaves");
    }
    assert_eq!([1000, 1001].map(|path| stand_by(&mut t, 1, 1, path)), [Ok(None); 2], "another queue");
    assert_eq!(stand_by(&mut t, 2, 0, 2), Err(Status::LIMIT_REACHED));
    for (path, spare) in [(3, 998), (4, 999)] {
        let leaves = t.holdings.join(id(2), &digest(2), QueueId(0), PathId(path)).unwrap();
        assert_eq!(leaves, Some((id(1), PathId(spare))), "a path never waits for a standby");
        t.holdings.path_failed(id(1), PathId(spare), 0);
    }
    // Its own standby makes room before others do.
    t.holdings.path_lost(id(2), PathId(4), 0);
    assert_eq!(stand_by(&mut t, 2, 0, 5), Ok(None));
    let leaves = t.holdings.join(id(2), &digest(2), QueueId(0), PathId(6)).unwrap();
    assert_eq!(leaves, Some((id(2), PathId(5))));
}

// ---- repeated attaches, paths

#[test]
fn a_repeated_attach_is_answered_again_to_whoever_has_the_secret() {
    let mut t = Target::new();
    let first = t.take(1, X);
    assert!(first.fresh);
    assert_eq!(t.take(1, X), Admitted { fresh: false, ..first });
    assert_eq!(t.status(&Attach { secret: Secret([9; 16]), ..request(1, X) }), Status::BAD_SECRET);
    assert_eq!(t.status(&request(1, R)), Status::BAD_PARAMETER);
    let elsewhere = t.send_to(1, &request(1, X));
    assert!(t.answers[&elsewhere].is_err());
    assert_eq!(t.generation(), 1);
}

#[test]
fn a_repetition_of_an_attach_that_waits_is_answered_with_it() {
    let mut t = Target::new();
    t.disk_hangs = true;
    let first = t.send(&request(1, X));
    let again = t.send(&request(1, X));
    assert!(t.waits(first) && t.waits(again));
    t.store();
    t.drive();
    let fresh = [first, again].map(|request| t.answers[&request].as_ref().unwrap().fresh);
    assert_eq!(fresh, [true, false], "the driver makes one session");
}

#[test]
fn a_path_needs_session_secret_and_queue() {
    let mut t = Target::new();
    t.take(1, X);
    assert_eq!(t.join(2, 2, 1), Err(Status::SESSION_LOST));
    assert_eq!(t.join(1, 2, 1), Err(Status::BAD_SECRET));
    let no_queue = t.holdings.join(id(1), &digest(1), QueueId(2), PathId(1));
    assert_eq!(no_queue.unwrap_err().status(), Status::BAD_PARAMETER);
    t.join(1, 1, 1).unwrap();
}

#[test]
fn a_session_that_never_gets_a_path_ends_soon_and_one_that_had_one_after_its_lease() {
    let mut t = Target::new();
    t.take(1, R);
    t.take(2, R);
    t.join(2, 2, 1).unwrap();
    t.holdings.path_lost(id(2), PathId(1), 0);
    assert_eq!(t.holdings.deadline_ms(), Some(5_000));
    t.pass(5_000);
    assert_eq!(t.ends, [(id(1), Status::CONNECTION_LOST)]);
    t.pass(54_999);
    assert_eq!(t.ends.len(), 1);
    t.pass(1);
    assert_eq!(t.ends[1], (id(2), Status::CONNECTION_LOST));
    assert_eq!(t.join(2, 2, 2), Err(Status::SESSION_LOST));
    assert_eq!(t.holdings.deadline_ms(), None);
}

// ---- I2

#[test]
fn i2_a_preempt_is_answered_only_when_the_last_command_of_the_old_sessions_has_ended() {
    let mut t = Target::new();
    t.take(1, S);
    t.take(2, S);
    t.take(3, R);
    let taker = t.send(&preempt(9, X));
    t.ends.sort_unstable_by_key(|end| end.0);
    assert_eq!(t.ends, [(id(1), Status::PREEMPTED), (id(2), Status::PREEMPTED)]);
    assert_eq!(t.join(1, 1, 1), Err(Status::SESSION_LOST), "decided is decided");
    assert_eq!(t.join(9, 9, 1), Err(Status::SESSION_LOST), "not answered yet");
    t.ended(1);
    assert!(t.waits(taker), "one of them still has commands at storage");
    // Nobody gets in between, not even to read.
    assert_eq!(t.status(&request(4, X)), Status::VOLUME_HELD);
    let reader = t.send(&request(5, R));
    assert!(t.waits(reader), "what it reads could still change");
    t.ended(2);
    assert_eq!(t.answers[&taker].as_ref().unwrap().generation, 3);
    assert!(t.answers[&reader].is_ok());
    assert_eq!(t.holdings.count(R), 2, "readers stay");
}

#[test]
fn i2_a_preempt_by_a_shared_writer_ends_all_writers_too() {
    let mut t = Target::new();
    t.take(1, S);
    t.send(&preempt(9, S));
    assert_eq!(t.ends, [(id(1), Status::PREEMPTED)]);
}

#[test]
fn i2_a_lease_that_ends_while_a_write_sits_at_the_disk_keeps_the_volume() {
    let mut t = Target::new();
    t.take(1, X);
    t.lease_over(1);
    let next = t.send(&request(2, X));
    let back = t.send(&Attach { generation: 1, ..request(1, X) });
    assert!(t.waits(next));
    assert_eq!(t.answers[&back].as_ref().unwrap_err().status(), Status::PREEMPTED, "the next one was first");
    let other_volume = t.send_to(1, &request(3, R));
    assert!(t.answers[&other_volume].is_ok());
    t.ended(1);
    assert!(t.answers[&next].is_ok());
}

#[test]
fn i2_a_session_whose_lease_ended_comes_back_only_when_its_own_commands_have_ended() {
    let mut t = Target::new();
    t.take(1, X);
    t.lease_over(1);
    let back = t.send(&Attach { generation: 1, ..request(1, X) });
    assert!(t.waits(back));
    t.ended(1);
    let admitted = t.answers[&back].clone().unwrap();
    assert_eq!((admitted.generation, admitted.fresh), (1, true));
}

#[test]
fn i10_who_waits_for_a_disk_that_hangs_is_refused_in_time_and_the_volume_is_free_later() {
    let mut t = Target::new();
    t.take(1, X);
    let taker = t.send(&preempt(2, X));
    assert_eq!(t.holdings.deadline_ms(), Some(30_000));
    t.pass(30_000);
    let refusal = t.answers[&taker].clone().unwrap_err();
    assert_eq!((refusal.status(), refusal.retry_after_ms()), (Status::VOLUME_HELD, 1000));
    assert!(refusal.to_string().contains("haven't ended within 30 s"), "{refusal}");
    let next = t.send(&request(3, X));
    assert!(t.waits(next));
    t.ended(1);
    assert!(t.answers[&next].is_ok());
}

#[test]
fn who_hangs_up_while_waiting_holds_nothing() {
    let mut t = Target::new();
    t.disk_hangs = true;
    let first = t.send(&request(1, X));
    t.holdings.withdraw(RequestId(first));
    t.disk_hangs = false;
    t.store();
    assert!(t.holdings.sessions.is_empty());
    assert!(t.waits(first));
    assert_eq!(t.state[0].as_ref().unwrap().holders.len(), 1, "it was recorded");
    t.drive();
    let mut t = t.restart(BOOT);
    assert!(t.attach(&request(2, X)).is_ok(), "and nobody waits for it in grace");
}

#[test]
fn a_successor_that_hangs_up_before_its_answer_loses_its_volume_to_nobody() {
    let mut t = Target::new();
    t.take(1, X);
    let successor = t.send(&takeover(1, X, 1, 2));
    t.holdings.withdraw(RequestId(successor));
    t.ended(1);
    assert!(t.waits(successor), "nobody is there to hear the answer");
    assert_eq!(t.status(&request(4, X)), Status::VOLUME_HELD);
    // It asks again and goes on.
    assert!(t.attach(&takeover(1, X, 1, 2)).unwrap().fresh);
    // Should it never ask again, that ends with the lease.
    let gone = t.send(&takeover(1, X, 2, 3));
    t.holdings.withdraw(RequestId(gone));
    t.ended(1);
    let lease_ms = u64::from(LIMITS.lease_ms);
    assert_eq!(t.holdings.deadline_ms(), Some(t.now_ms + lease_ms));
    t.pass(lease_ms);
    assert!(t.take(4, X).fresh);
}

#[test]
fn a_preempt_refuses_those_who_still_wait() {
    let mut t = Target::new();
    t.take(1, X);
    let first = t.send(&preempt(2, X));
    let second = t.send(&preempt(3, X));
    assert_eq!(t.answers[&first], Err(Refusal::Preempted));
    assert_eq!(t.ends.len(), 1, "no reactor ever heard of session 2");
    t.ended(1);
    assert!(t.answers[&second].is_ok());
}

#[test]
fn a_closed_session_ends_once_and_its_volume_is_free_when_that_is_confirmed() {
    let mut t = Target::new();
    t.take(1, X);
    t.holdings.close(id(1));
    t.holdings.close(id(1));
    t.drive();
    assert_eq!(t.ends, [(id(1), Status::CLOSED)]);
    let next = t.send(&request(2, X));
    assert!(t.waits(next));
    t.ended(1);
    t.ended(1);
    assert!(t.answers[&next].is_ok());
}

// ---- generation

#[test]
fn each_other_writer_raises_the_generation_and_a_past_one_is_refused() {
    let mut t = Target::new();
    assert_eq!(t.take(1, X).generation, 1);
    assert_eq!(t.take(2, R).generation, 1);
    t.lose(1);
    let back = Attach { generation: 1, ..request(1, X) };
    assert_eq!(t.attach(&back).unwrap().generation, 1, "the same holder");
    t.lose(1);
    assert_eq!(t.take(3, X).generation, 2, "a second initiator attaches between");
    t.close(3);
    let refusal = t.attach(&back).unwrap_err();
    assert_eq!(refusal, Refusal::GenerationPast { current: 2, seen: 1 });
    assert_eq!(refusal.status(), Status::PREEMPTED);
    t.attach(&Attach { mode: R, ..back }).unwrap();
}

#[test]
fn a_shared_writer_that_came_and_went_while_an_exclusive_holder_was_away_shuts_it_out() {
    let mut t = Target::new();
    t.take(1, X);
    t.lose(1);
    t.take(2, S);
    t.close(2);
    assert_eq!(t.status(&Attach { generation: 1, ..request(1, X) }), Status::PREEMPTED);
    assert_eq!(t.take(1, X).generation, 3, "anew it may");
}

#[test]
fn a_preempted_initiator_that_wakes_up_may_not_come_back_not_even_by_preempt() {
    let mut t = Target::new();
    t.take(1, X);
    t.send(&preempt(2, X));
    t.ended(1);
    for attach in [request(1, X), preempt(1, X)] {
        assert_eq!(t.status(&Attach { generation: 1, ..attach }), Status::PREEMPTED);
    }
}

#[test]
fn shared_writers_that_were_there_together_all_come_back_after_a_restart() {
    let mut t = Target::new();
    t.take(1, S);
    t.take(2, S);
    let mut t = t.restart(BOOT);
    assert_eq!(t.attach(&Attach { generation: 1, ..request(1, S) }).unwrap().generation, 2);
    assert_eq!(t.attach(&Attach { generation: 2, ..request(2, S) }).unwrap().generation, 2);
}

#[test]
fn a_target_that_lost_its_state_does_not_take_back_whom_it_does_not_know() {
    let mut t = Target::new();
    t.take(1, X);
    let mut t = Target::start([None, None], BOOT, LIMITS);
    let back = Attach { generation: 1, ..request(1, X) };
    assert_eq!(t.attach(&back), Err(Refusal::StateIsOlder { current: 0, seen: 1 }));
}

// ---- restart, grace, what is stored

#[test]
fn nothing_is_answered_before_it_is_stored() {
    let mut t = Target::new();
    t.disk_hangs = true;
    let first = t.send(&request(1, X));
    assert!(t.waits(first));
    assert_eq!(t.status(&request(2, X)), Status::VOLUME_HELD, "decided all the same");
    assert_eq!(t.join(1, 1, 1), Err(Status::SESSION_LOST));
    t.store();
    t.drive();
    assert!(t.answers[&first].is_ok());
}

#[test]
fn a_record_that_cannot_be_stored_is_stored_with_the_next_attempt() {
    let mut t = Target::new();
    t.disk_hangs = true;
    let first = t.send(&request(1, X));
    t.to_store.clear();
    t.holdings.not_stored(0);
    t.drive();
    assert_eq!(t.answers[&first], Err(Refusal::NotStored));
    t.disk_hangs = false;
    t.take(1, X);
    assert_eq!(t.state[0].as_ref(), t.holdings.record(0));
}

#[test]
fn for_one_lease_after_a_restart_only_recorded_holders_attach_without_preempt() {
    let mut t = Target::new();
    t.take(1, X);
    let mut t = t.restart(BOOT);
    t.pass(1_000);
    let refusal = t.attach(&request(2, X)).unwrap_err();
    assert_eq!((refusal.status(), refusal.retry_after_ms()), (Status::GRACE, 59_000));
    assert_eq!(t.status(&Attach { secret: Secret([9; 16]), ..request(1, X) }), Status::BAD_SECRET);
    t.take(3, R);
    assert_eq!(t.attach(&Attach { generation: 1, ..request(1, X) }).unwrap().generation, 1);

    // Nobody came back.
    let mut t = t.restart(BOOT);
    t.pass(60_000);
    t.take(2, X);
    assert_eq!(t.status(&Attach { generation: 1, ..request(1, X) }), Status::PREEMPTED);

    // Somebody doesn't wait.
    let mut t = t.restart(BOOT);
    assert_eq!(t.attach(&preempt(4, X)).unwrap().generation, 3);
    assert_eq!(t.status(&Attach { generation: 2, ..request(2, X) }), Status::PREEMPTED);
}

#[test]
fn grace_is_for_those_of_before_and_not_for_whom_the_target_saw_leave() {
    let mut t = Target::new();
    t.take(1, X);
    t.pass(LIMITS.first_path_ms);
    t.ended(1);
    t.take(2, X);
    let mut t = t.restart(BOOT);
    t.attach(&Attach { generation: 2, ..request(2, X) }).unwrap();
    t.pass(LIMITS.first_path_ms);
    t.ended(2);
    t.take(3, X);
}

#[test]
fn nobody_waits_for_a_holder_that_has_left_in_order() {
    let mut t = Target::new();
    t.take(1, X);
    t.close(1);
    let mut t = t.restart(BOOT);
    t.take(2, X);
}

// ---- takeover

#[test]
fn a_takeover_replaces_the_secret_and_waits_for_its_predecessors_commands() {
    let mut t = Target::new();
    t.take(1, X);
    t.join(1, 1, 1).unwrap();
    let successor = t.send(&takeover(1, X, 1, 2));
    assert_eq!(t.ends, [(id(1), Status::TAKEN_OVER)]);
    assert!(t.waits(successor));
    assert_eq!(t.join(1, 1, 2), Err(Status::PREEMPTED));
    t.ended(1);
    let admitted = t.answers[&successor].clone().unwrap();
    assert_eq!((admitted.generation, admitted.fresh, admitted.inherited), (1, true, Inherited::Unflushed));
    // The front end that was taken over wakes up.
    assert_eq!(t.join(1, 1, 2), Err(Status::PREEMPTED));
    assert_eq!(t.status(&Attach { generation: 1, ..request(1, X) }), Status::PREEMPTED);
    assert_eq!(t.status(&takeover(1, X, 1, 7)), Status::PREEMPTED);
    t.join(1, 2, 3).unwrap();
    // Also after a restart, and when somebody else has the volume.
    let mut t = t.restart(BOOT);
    assert_eq!(t.status(&Attach { generation: 1, ..request(1, X) }), Status::PREEMPTED);
    t.send(&preempt(5, X));
    t.close(5);
    assert_eq!(t.status(&request(1, X)), Status::PREEMPTED);
}

#[test]
fn the_new_secret_is_stored_before_a_takeover_is_answered() {
    let mut t = Target::new();
    t.take(1, X);
    t.disk_hangs = true;
    let successor = t.send(&takeover(1, X, 1, 2));
    t.ended(1);
    assert!(t.waits(successor));
    // The target dies: the old secret is still the one.
    let mut back = Target::start(t.state.clone(), BOOT, LIMITS);
    assert!(back.attach(&takeover(1, X, 1, 2)).is_ok());
    t.store();
    t.drive();
    assert!(t.answers[&successor].is_ok());
    assert_eq!(t.state[0].as_ref().unwrap().holders[0].secret, digest(2));
}

#[test]
fn of_two_successors_at_once_one_takes_over() {
    let mut t = Target::new();
    t.take(1, X);
    let first = t.send(&takeover(1, X, 1, 2));
    let second = t.send(&takeover(1, X, 1, 3));
    assert_eq!(t.answers[&second], Err(Refusal::TakenOver { session: id(1) }));
    t.ended(1);
    assert!(t.answers[&first].is_ok());
}

#[test]
fn a_repeated_takeover_is_answered_again() {
    let mut t = Target::new();
    t.take(1, X);
    let first = t.send(&takeover(1, X, 1, 2));
    let again = t.send(&takeover(1, X, 1, 2));
    t.ended(1);
    assert!(t.answers[&first].as_ref().unwrap().fresh);
    assert!(!t.answers[&again].as_ref().unwrap().fresh);
    assert!(!t.attach(&takeover(1, X, 1, 2)).unwrap().fresh);
    // Its connection broke, and then the target was restarted.
    let mut t = t.restart(BOOT);
    assert!(t.attach(&takeover(1, X, 1, 2)).is_ok());
    assert_eq!(t.holdings.record(0).unwrap().replaced, [digest(1)]);
}

#[test]
fn a_successor_of_a_successor_that_died_shows_the_secret_that_was_stored_beside() {
    let mut t = Target::new();
    t.take(1, X);
    // The first successor never reached the target: its secret is nothing there.
    assert_eq!(t.status(&takeover(1, X, 2, 3)), Status::BAD_SECRET);
    let next = t.send(&takeover(1, X, 1, 3));
    t.ended(1);
    assert!(t.answers[&next].is_ok());
    // This one did, and died before it heard so.
    let next = t.send(&takeover(1, X, 3, 4));
    t.ended(1);
    assert!(t.answers[&next].is_ok());
}

#[test]
fn a_session_that_nobody_knows_cannot_be_taken_over() {
    let mut t = Target::new();
    assert_eq!(t.status(&takeover(1, X, 1, 2)), Status::SESSION_LOST);
    t.take(1, X);
    t.lose(1);
    t.take(2, X);
    t.close(2);
    assert_eq!(t.status(&Attach { generation: 1, ..takeover(1, X, 1, 2) }), Status::PREEMPTED);
}

#[test]
fn a_reader_is_taken_over_too() {
    let mut t = Target::new();
    t.take(1, R);
    let successor = t.send(&takeover(1, R, 1, 2));
    t.ended(1);
    assert_eq!(t.answers[&successor].as_ref().unwrap().inherited, Inherited::Nothing);
    assert_eq!(t.status(&request(1, R)), Status::PREEMPTED);
}

// ---- I5

#[test]
fn i5_a_takeover_after_a_reboot_or_a_failed_sync_has_lost_writes_until_it_leaves() {
    for (boot_id, failed_syncs, lost) in [(BOOT, 0, false), (BootId([1; 16]), 0, true), (BOOT, 1, true)] {
        let mut t = Target::new();
        t.take(1, X);
        let mut t = t.restart(boot_id);
        t.holdings.sync_failed(0, failed_syncs);
        t.drive();
        let inherited = t.attach(&takeover(1, X, 1, 2)).unwrap().inherited;
        assert_eq!(inherited, if lost { Inherited::Lost } else { Inherited::Unflushed });
        assert_eq!(t.state[0].as_ref().unwrap().holders[0].lost_writes, lost, "stored before it was answered");
        // It comes back, after a restart too.
        let mut t = t.restart(boot_id);
        let back = Attach { secret: Secret([2; 16]), generation: 1, ..request(1, X) };
        assert_eq!(t.attach(&back).unwrap().inherited == Inherited::Lost, lost);
        t.close(1);
        let new = t.attach(&preempt(3, X)).unwrap();
        assert_eq!(new.inherited, Inherited::Nothing);
    }
}

#[test]
fn i5_a_holder_that_comes_back_without_its_slot_tables_has_unflushed_writes() {
    let mut t = Target::new();
    assert_eq!(t.attach(&request(1, X)).unwrap().inherited, Inherited::Nothing);
    let mut t = t.restart(BOOT);
    let back = t.attach(&Attach { generation: 1, ..request(1, X) }).unwrap();
    assert_eq!(back.inherited, Inherited::Unflushed, "what it wrote before was acknowledged, and isn't synced");
    // So that a sync that fails before its first FLUSH counts against it, though it has written nothing since.
    let ledger = FlushLedger::inheriting(back.inherited, back.failed_syncs);
    let mark = ledger.flush_begins();
    assert!(!ledger.flush_ends(mark, back.failed_syncs + 1));
}

#[test]
fn i5_what_the_predecessor_flushed_is_not_lost_to_its_successor() {
    let mut t = Target::new();
    t.take(1, X);
    let ledger = FlushLedger::new(0);
    // A sync fails while it has nothing unflushed; then it writes and flushes.
    t.holdings.sync_failed(0, 1);
    ledger.change_begins(1);
    ledger.change_ends();
    assert!(ledger.flush_ends(ledger.flush_begins(), 1));
    let successor = t.send(&takeover(1, X, 1, 2));
    t.ended_with(1, ledger.flushed());
    assert_eq!(t.answers[&successor].as_ref().unwrap().inherited, Inherited::Unflushed);
}

#[test]
fn i5_a_failed_sync_is_stored_before_anybody_hears_of_it() {
    let mut t = Target::new();
    t.take(1, X);
    t.disk_hangs = true;
    let version = t.holdings.sync_failed(0, 1).unwrap();
    t.drive();
    assert_eq!(t.to_store.last().unwrap().1.version, version);
    assert_eq!(t.holdings.sync_failed(0, 1), Some(version), "still not stored");
    t.store();
    assert_eq!(t.holdings.sync_failed(0, 1), None);
    assert_eq!(t.restart(BOOT).attach(&request(1, X)).unwrap().failed_syncs, 1);
}

#[test]
fn i5_a_drain_that_synced_is_told_to_each_holder_once_and_erased_before_the_next_write() {
    let mut t = Target::new();
    t.take(1, S);
    t.take(2, S);
    t.holdings.drain();
    t.holdings.drained(0);
    t.drive();
    assert_eq!(t.state[0].as_ref().unwrap().synced_boot_id, BOOT);
    let mut t = t.restart(BootId([1; 16]));
    t.take(8, R);
    assert_eq!(t.state[0].as_ref().unwrap().synced_boot_id, BOOT, "a reader writes nothing");
    let first = Attach { generation: 1, ..request(1, S) };
    assert_eq!(t.attach(&first).unwrap().synced_boot_id, BOOT);
    assert_eq!(t.state[0].as_ref().unwrap().synced_boot_id, BootId::NIL, "stored before it was answered");
    assert_eq!(t.attach(&first).unwrap().synced_boot_id, BOOT, "its answer was lost");
    // What the second one wrote before the drain is as safe as that of the first.
    assert_eq!(t.attach(&Attach { generation: 2, ..request(2, S) }).unwrap().synced_boot_id, BOOT);
    // Since then the first may have written under this boot.
    t.lose(1);
    assert_eq!(t.attach(&first).unwrap().synced_boot_id, BootId::NIL);
    // A target that dies now tells nobody.
    let mut t = t.restart(BootId([2; 16]));
    assert_eq!(t.attach(&first).unwrap().synced_boot_id, BootId::NIL);
}

#[test]
fn i5_a_takeover_after_a_drain_that_synced_has_lost_nothing() {
    let mut t = Target::new();
    t.take(1, X);
    t.holdings.drain();
    t.holdings.drained(0);
    t.drive();
    let mut t = t.restart(BootId([1; 16]));
    assert_eq!(t.attach(&takeover(1, X, 1, 2)).unwrap().inherited, Inherited::Unflushed);
}

// ---- drain

#[test]
fn a_draining_target_accepts_nothing_and_answers_those_who_wait() {
    let mut t = Target::new();
    t.take(1, X);
    let taker = t.send(&preempt(2, X));
    t.holdings.drain();
    t.drive();
    assert_eq!(t.answers[&taker], Err(Refusal::Draining));
    assert_eq!(t.status(&request(3, R)), Status::DRAINING);
    assert_eq!(t.join(1, 1, 1), Err(Status::DRAINING));
}

//! The session as the initiator knows it: who it is, what it may still believe of its volume, and what follows
//! when the target says no or has forgotten it.
//!
//! ```text
//!        attached              lost                    refused for good, or fail-fast
//!  new ───────────▶ attached ─────────▶ lost ─────────────────────────────────────────▶ over
//!                       ▲                 │ attached again (same id, secret, generation)
//!                       └─────────────────┘
//! ```
//!
//! One session has several queues, and perhaps as many threads; one of them owns this. Before it attaches again
//! every queue must be fenced: whatever comes from the lost session afterwards is stale.

use super::durability::{Durability, Ground};
use super::replay::Rules;
use crate::ids::{BootId, Secret, SessionId, VolumeId};
use crate::status::Status;
use crate::wire::{Attach, AttachFlags, AttachMode, Attached};

/// How long a stop may take by default, in microseconds: as long as service managers and people wait.
pub const DEFAULT_STOP_US: u64 = 30_000_000;

/// What the caller chose.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How the volume is held.
    pub mode: AttachMode,
    /// The volume expected at the first attach; [`VolumeId::NIL`] for any.
    pub expected_volume: VolumeId,
    /// Ends writers that are in the way of the first attach.
    pub preempt: bool,
    /// The session ends when its last path is lost, instead of holding its commands.
    pub fail_fast: bool,
    /// How long a stop may take, in microseconds.
    pub stop_us: u64,
}

impl Default for Settings {
    fn default() -> Self {
        let (mode, expected_volume) = (AttachMode::EXCLUSIVE, VolumeId::NIL);
        Self { mode, expected_volume, preempt: false, fail_fast: false, stop_us: DEFAULT_STOP_US }
    }
}

/// What a front end knows of the session whose place it takes, from its file.
#[derive(Clone, Copy, Debug)]
pub struct Predecessor {
    /// The secret that replaces the old one; stored beside it before it is shown to anybody.
    pub next_secret: Secret,
    /// The volume's generation.
    pub generation: u64,
    /// What its unflushed writes stand on. Without a boot id in the file every FLUSH fails: nobody can say
    /// whether the target's host rebooted.
    pub ground: Ground,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Attach, not sooner than in so many milliseconds; else as the backoff of the path has it.
    Attach {
        /// Milliseconds; 0 says nothing.
        retry_after_ms: u32,
    },
    /// The session is over: every command ends with this status ([`super::Queue::abandon`]).
    GiveUp(Status),
}

/// What an ATTACHED means.
#[derive(Clone, Copy, Debug)]
pub enum Begun {
    /// The session exists, or a repeated ATTACH was answered again: nothing was lost.
    First,
    /// It was lost, and exists again with new slot tables: the commands that are out in the old ones go by these
    /// rules ([`super::Queue::retire`]).
    Again(Rules),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    New,
    Attached,
    Lost,
    Over(Status),
}

/// One session.
#[derive(Debug)]
pub struct Session {
    id: SessionId,
    secret: Secret,
    next_secret: Option<Secret>,
    settings: Settings,
    /// From the first attach on: that volume and no other.
    volume: VolumeId,
    generation: u64,
    ground: Ground,
    state: State,
    stop_at_us: Option<u64>,
}

impl Session {
    /// A new session; `id` and `secret` are random.
    #[must_use]
    pub fn new(id: SessionId, secret: Secret, settings: Settings) -> Self {
        let volume = settings.expected_volume;
        let (generation, ground, state) = (0, Ground::default(), State::New);
        Self { id, secret, next_secret: None, settings, volume, generation, ground, state, stop_at_us: None }
    }

    /// Takes the place of a session with this id and secret.
    #[must_use]
    pub fn take_over(id: SessionId, secret: Secret, predecessor: Predecessor, settings: Settings) -> Self {
        let Predecessor { next_secret, generation, ground } = predecessor;
        Self { next_secret: Some(next_secret), generation, ground, ..Self::new(id, secret, settings) }
    }

    /// The session's id.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// What every activation shows.
    #[must_use]
    pub fn secret(&self) -> Secret {
        self.secret
    }

    /// The volume's generation as it is known; 0 before the first attach.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// What unflushed writes stand on: what a front end keeps in its file, for its successor.
    #[must_use]
    pub fn ground(&self) -> Ground {
        self.ground
    }

    /// Whether it is attached, as far as is known.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.state == State::Attached
    }

    /// How it ended, if it has.
    #[must_use]
    pub fn over(&self) -> Option<Status> {
        match self.state {
            State::Over(status) => Some(status),
            _ => None,
        }
    }

    /// The ATTACH to send: the first, a repetition, or the one after a loss.
    #[must_use]
    pub fn attach<'a>(&self, queues: u16, volume: &'a str) -> Attach<'a> {
        let flags = match (self.state, self.next_secret) {
            (_, Some(_)) => AttachFlags::TAKEOVER,
            // Once the session existed, another writer that is there has preempted it.
            (State::New, None) if self.settings.preempt => AttachFlags::PREEMPT,
            _ => AttachFlags::default(),
        };
        Attach {
            session: self.id,
            secret: self.secret,
            next_secret: self.next_secret.unwrap_or(Secret([0; 16])),
            mode: self.settings.mode,
            flags,
            queues,
            expected_volume: self.volume,
            generation: self.generation,
            volume,
        }
    }

    /// ATTACHED came, from a target whose WELCOME said `boot_id`.
    ///
    /// # Errors
    /// The status that the session is over with: the target has attached another volume than was asked for.
    pub fn attached(
        &mut self,
        attached: &Attached<'_>,
        boot_id: BootId,
        durability: &Durability,
    ) -> Result<Begun, Status> {
        if !self.volume.is_nil() && attached.volume != self.volume {
            self.state = State::Over(Status::WRONG_VOLUME);
            return Err(Status::WRONG_VOLUME);
        }
        let now = Ground { boot_id, failed_syncs: attached.failed_syncs };
        let taken_over = self.next_secret.take();
        self.secret = taken_over.unwrap_or(self.secret);
        let again = self.state == State::Lost;
        if again || taken_over.is_some() {
            durability.attached_again(self.ground, now, attached.synced_boot_id);
        }
        // Should another writer have been there after all, nothing is repeated over what it wrote.
        let alone = self.settings.mode == AttachMode::EXCLUSIVE && attached.generation == self.generation;
        let rules = Rules { alone, poisoned: durability.is_poisoned() };
        // While the session lives its target watches over what it wrote: the ground is that of the attach.
        if again || taken_over.is_some() || self.state == State::New {
            self.ground = now;
        }
        (self.volume, self.generation, self.state) = (attached.volume, attached.generation, State::Attached);
        Ok(if again { Begun::Again(rules) } else { Begun::First })
    }

    /// The target has no such session any more, or another slot table: SESSION_LOST on ACTIVATE or STANDBY, or an
    /// instance that differs.
    pub fn lost(&mut self) -> Next {
        match self.state {
            State::Over(status) => return Next::GiveUp(status),
            State::Attached => self.state = State::Lost,
            // There is nothing to take over any more. Nobody records readers: they begin anew. Of a writer the target
            // would know, so that its state was lost, and who wrote since can't be told.
            State::New if self.next_secret.is_some() => match self.settings.mode {
                AttachMode::READ_ONLY => self.secret = self.next_secret.take().unwrap_or(self.secret),
                _ => return self.give_up(Status::SESSION_LOST),
            },
            State::New | State::Lost => {}
        }
        match self.settings.fail_fast && self.state == State::Lost {
            true => self.give_up(Status::OUTCOME_UNKNOWN),
            false => Next::Attach { retry_after_ms: 0 },
        }
    }

    /// The last path of the last queue is lost, or held long enough, and the caller doesn't want to wait.
    pub fn pathless(&mut self) -> Option<Next> {
        (self.settings.fail_fast && self.state != State::New).then(|| self.give_up(Status::OUTCOME_UNKNOWN))
    }

    /// The target refused an ATTACH, STANDBY or ACTIVATE, with `status`.
    pub fn refused(&mut self, status: Status, retry_after_ms: u32) -> Next {
        if status == Status::SESSION_LOST {
            return self.lost();
        }
        if let State::Over(status) = self.state {
            return Next::GiveUp(status);
        }
        // A caller who attaches hears at once what is wrong. Later commands are held: an operator may yet mend it.
        match self.state == State::New || is_final(status) {
            true => self.give_up(status),
            false => Next::Attach { retry_after_ms },
        }
    }

    fn give_up(&mut self, status: Status) -> Next {
        self.state = State::Over(status);
        Next::GiveUp(status)
    }

    /// The caller wants to stop: nothing new is accepted, and what is out has until then to end.
    pub fn stop(&mut self, now_us: u64) {
        self.stop_at_us.get_or_insert(now_us.saturating_add(self.settings.stop_us));
    }

    /// Whether [`Self::stop`] was called.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stop_at_us.is_some()
    }

    /// When [`Self::tick`] has something to say, in microseconds.
    #[must_use]
    pub fn deadline_us(&self) -> Option<u64> {
        self.stop_at_us.filter(|_| self.over().is_none())
    }

    /// Time has passed: whether a stop has taken too long.
    pub fn tick(&mut self, now_us: u64) -> Option<Next> {
        let overdue = self.deadline_us().is_some_and(|deadline_us| deadline_us <= now_us);
        overdue.then(|| self.give_up(Status::OUTCOME_UNKNOWN))
    }
}

/// No waiting and no operator makes this session's attach possible again.
fn is_final(status: Status) -> bool {
    [Status::PREEMPTED, Status::TAKEN_OVER, Status::BAD_SECRET, Status::WRONG_VOLUME].contains(&status)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOLUME: VolumeId = VolumeId([3; 16]);
    const BOOT: BootId = BootId([4; 16]);
    const SECRET: Secret = Secret([2; 16]);

    fn session(settings: Settings) -> Session {
        Session::new(SessionId([1; 16]), SECRET, settings)
    }

    fn attached_to(volume: VolumeId, generation: u64) -> Attached<'static> {
        let mut attached = Attached::new(volume);
        attached.generation = generation;
        attached
    }

    fn attached(generation: u64) -> Attached<'static> {
        attached_to(VOLUME, generation)
    }

    fn begin(settings: Settings) -> (Session, Durability) {
        let (mut s, d) = (session(settings), Durability::new(false));
        assert!(matches!(s.attached(&attached(5), BOOT, &d), Ok(Begun::First)));
        (s, d)
    }

    #[test]
    fn a_lost_session_asks_for_the_same_volume_and_shows_its_generation() {
        let (mut s, d) = begin(Settings { preempt: true, ..Settings::default() });
        assert_eq!(s.refused(Status::SESSION_LOST, 0), Next::Attach { retry_after_ms: 0 });
        let attach = s.attach(4, "disk0");
        assert_eq!((attach.generation, attach.expected_volume, attach.secret), (5, VOLUME, SECRET));
        assert_eq!(attach.flags, AttachFlags::default(), "it preempts nobody twice");
        let Ok(Begun::Again(rules)) = s.attached(&attached(5), BOOT, &d) else { panic!("not again") };
        assert!(rules.alone && !rules.poisoned);
    }

    #[test]
    fn an_exclusive_holder_that_finds_another_generation_repeats_nothing() {
        let (mut s, d) = begin(Settings::default());
        s.lost();
        let Ok(Begun::Again(rules)) = s.attached(&attached(6), BOOT, &d) else { panic!("not again") };
        assert!(!rules.alone);
    }

    #[test]
    fn another_image_under_the_same_name_ends_the_session() {
        let (mut s, d) = begin(Settings::default());
        s.lost();
        assert_eq!(s.attached(&attached_to(VolumeId([9; 16]), 5), BOOT, &d).err(), Some(Status::WRONG_VOLUME));
        assert_eq!(s.over(), Some(Status::WRONG_VOLUME));
    }

    #[test]
    fn a_first_attach_fails_at_once_and_a_later_one_is_tried_until_it_is_hopeless() {
        assert_eq!(session(Settings::default()).refused(Status::GRACE, 100), Next::GiveUp(Status::GRACE));
        let (mut s, _) = begin(Settings::default());
        s.lost();
        for status in [Status::GRACE, Status::DRAINING, Status::LIMIT_REACHED, Status::UNKNOWN_VOLUME] {
            assert_eq!(s.refused(status, 100), Next::Attach { retry_after_ms: 100 });
        }
        assert_eq!(s.refused(Status::PREEMPTED, 100), Next::GiveUp(Status::PREEMPTED));
        assert_eq!(s.refused(Status::GRACE, 100), Next::GiveUp(Status::PREEMPTED), "over is over");
        assert_eq!(s.lost(), Next::GiveUp(Status::PREEMPTED));
    }

    #[test]
    fn with_fail_fast_a_session_does_not_outlive_its_paths() {
        let (mut held, _) = begin(Settings::default());
        assert_eq!(held.pathless(), None);
        let (mut s, _) = begin(Settings { fail_fast: true, ..Settings::default() });
        assert_eq!(s.pathless(), Some(Next::GiveUp(Status::OUTCOME_UNKNOWN)));
        let (mut s, _) = begin(Settings { fail_fast: true, ..Settings::default() });
        assert_eq!(s.lost(), Next::GiveUp(Status::OUTCOME_UNKNOWN));
    }

    #[test]
    fn i5_the_ground_of_unflushed_writes_is_that_of_the_attach_they_were_made_under() {
        use crate::opcode::{Flags, Opcode};
        let (mut s, d) = begin(Settings::default());
        let _ = d.ended(Opcode::WRITE, Flags::NONE, Status::OK, d.submitted());
        s.lost();
        let Ok(Begun::Again(rules)) = s.attached(&attached(5), BootId([7; 16]), &d) else { panic!("not again") };
        assert!(rules.poisoned);
        assert_eq!(s.ground().boot_id, BootId([7; 16]));
    }

    #[test]
    fn a_reader_whose_session_is_gone_begins_anew_instead_of_taking_over_for_ever() {
        let next_secret = Secret([9; 16]);
        let predecessor = || Predecessor { next_secret, generation: 5, ground: Ground::default() };
        let take_over = |mode| {
            let settings = Settings { mode, ..Settings::default() };
            Session::take_over(SessionId([1; 16]), SECRET, predecessor(), settings)
        };
        let mut reader = take_over(AttachMode::READ_ONLY);
        assert!(reader.attach(1, "v").flags.has(AttachFlags::TAKEOVER));
        assert!(matches!(reader.refused(Status::SESSION_LOST, 0), Next::Attach { .. }));
        let attach = reader.attach(1, "v");
        assert!(!attach.flags.has(AttachFlags::TAKEOVER) && attach.secret == next_secret);
        let mut writer = take_over(AttachMode::EXCLUSIVE);
        assert_eq!(writer.refused(Status::SESSION_LOST, 0), Next::GiveUp(Status::SESSION_LOST));
    }

    #[test]
    fn after_a_takeover_the_next_secret_is_the_one_to_show() {
        let next_secret = Secret([8; 16]);
        let predecessor = Predecessor { next_secret, generation: 5, ground: Ground { boot_id: BOOT, failed_syncs: 0 } };
        let mut s = Session::take_over(SessionId([1; 16]), SECRET, predecessor, Settings::default());
        let attach = s.attach(1, "disk0");
        assert_eq!((attach.flags, attach.secret, attach.next_secret), (AttachFlags::TAKEOVER, SECRET, next_secret));
        s.attached(&attached(5), BOOT, &Durability::taken_over(false)).unwrap();
        let attach = s.attach(1, "disk0");
        assert_eq!((attach.flags, attach.secret), (AttachFlags::default(), next_secret));
        assert_eq!(s.secret(), next_secret);
    }

    #[test]
    fn a_stop_is_bounded() {
        let (mut s, _) = begin(Settings::default());
        s.stop(1_000);
        s.stop(2_000);
        assert_eq!(s.deadline_us(), Some(1_000 + DEFAULT_STOP_US));
        assert_eq!(s.tick(DEFAULT_STOP_US), None);
        assert_eq!(s.tick(1_000 + DEFAULT_STOP_US), Some(Next::GiveUp(Status::OUTCOME_UNKNOWN)));
        assert_eq!((s.deadline_us(), s.tick(u64::MAX)), (None, None));
    }
}

//! Who may hold a volume: writers that don't go together never hold it at once; in the grace after a start
//! only recorded holders come in without preempt; nobody goes on whose generation is past, who shows a
//! replaced secret, or who would find another volume.

use super::Breach;
use super::ledger::{Ledger, breach};
use crate::history::{AttachAnswer, Client, Ending, History, Micros, Mode, SecretNumber, Session, What};

const NAME: &str = "holders";

/// A client and those who took its place are one holder, named by the first of them.
#[derive(Debug, Default)]
struct Lineage(Vec<(Client, Client)>);

impl Lineage {
    fn root(&self, client: Client) -> Client {
        self.0.iter().find(|(known, _)| *known == client).map_or(client, |(_, root)| *root)
    }
}

#[derive(Debug)]
struct Held {
    session: Session,
    holder: Client,
    mode: Mode,
}

#[derive(Debug)]
struct Known {
    holder: Client,
    volume: u32,
    /// Another writer attached since.
    past: bool,
}

#[derive(Debug, Default)]
struct Volume {
    lineage: Lineage,
    live: Vec<Held>,
    seen: Vec<Session>,
    known: Vec<Known>,
    /// Writers that the state file names, and haven't closed.
    recorded: Vec<(Client, Mode)>,
    replaced: Vec<(SecretNumber, SecretNumber)>,
    grace_until: Micros,
    restarted: bool,
    /// Whom the state file names, if there is one: a next process takes them for holders, told or not.
    file: Option<Vec<(Client, Mode)>>,
}

fn conflict(one: Mode, other: Mode) -> bool {
    !matches!((one, other), (Mode::ReadOnly, _) | (_, Mode::ReadOnly) | (Mode::Shared, Mode::Shared))
}

impl Volume {
    fn attach(&mut self, answer: &AttachAnswer, now: Micros) -> Result<(), String> {
        let AttachAnswer { session, client, secret, next_secret, mode, volume, .. } = *answer;
        let holder = self.lineage.root(client);
        if let Some((_, by)) = self.replaced.iter().find(|(old, _)| *old == secret)
            && next_secret != Some(*by)
        {
            return Err(format!("{client:?} came in with {secret:?}, which {by:?} had replaced"));
        }
        if let Some(next) = next_secret
            && !self.replaced.contains(&(secret, next))
        {
            self.replaced.push((secret, next));
        }
        if self.seen.contains(&session) {
            return Ok(());
        }
        self.seen.push(session);
        if let Some(held) = self.live.iter().find(|held| conflict(held.mode, mode)) {
            return Err(format!("{client:?} came in {mode:?} beside {held:?}"));
        }
        let recorded = self.recorded.iter().any(|(known, _)| *known == holder);
        if self.restarted && now < self.grace_until && !answer.preempt && !recorded {
            let protected = self.recorded.iter().find(|(_, other)| conflict(*other, mode));
            if let Some((other, _)) = protected {
                return Err(format!("{client:?} came in during the grace of {other:?}"));
            }
        }
        if let Some(known) = self.known.iter().find(|known| known.holder == holder)
            && answer.goes_on
        {
            if known.past && mode == Mode::Exclusive {
                return Err(format!("{client:?} goes on though another writer attached since"));
            }
            if known.volume != volume {
                return Err(format!("{client:?} goes on with volume {volume} instead of {}", known.volume));
            }
        }
        if mode != Mode::ReadOnly {
            let stranger = !recorded || answer.preempt;
            for known in self.known.iter_mut().filter(|known| known.holder != holder && stranger) {
                known.past = true;
            }
            self.recorded.retain(|(known, other)| *known != holder && !answer.preempt && !conflict(*other, mode));
            self.recorded.push((holder, mode));
        }
        self.known.retain(|known| known.holder != holder);
        self.known.push(Known { holder, volume, past: false });
        self.live.push(Held { session, holder, mode });
        Ok(())
    }

    fn end(&mut self, session: Session, how: Ending) {
        if how == Ending::Closed
            && let Some(held) = self.live.iter().find(|held| held.session == session)
        {
            let holder = held.holder;
            self.recorded.retain(|(known, _)| *known != holder);
        }
    }
}

/// # Errors
/// An attach was answered that had to be refused.
pub fn check(history: &History, _: &Ledger) -> Result<(), Breach> {
    let mut volume = Volume::default();
    for (position, event) in history.events.iter().enumerate() {
        match event.what {
            What::Opened { client, inherits: Some(from) } => {
                let root = volume.lineage.root(from);
                volume.lineage.0.push((client, root));
            }
            What::Attached(answer) => {
                volume.attach(&answer, event.at).map_err(|what| breach(NAME, history, position, what))?;
            }
            What::RecordStored => volume.file = Some(Vec::new()),
            What::Claimed { client, mode } => {
                let holder = volume.lineage.root(client);
                volume.file.get_or_insert_default().push((holder, mode));
            }
            What::SessionEnding { session, how } => volume.end(session, how),
            What::SessionEnded { session } => volume.live.retain(|held| held.session != session),
            What::Crashed | What::Rebooted => volume.live.clear(),
            What::Started => {
                volume.restarted = true;
                if let Some(file) = &volume.file {
                    volume.recorded.clone_from(file);
                }
                // The target counts in milliseconds.
                volume.grace_until = (event.at + history.setup.lease).saturating_sub(1_000);
            }
            // Another image has a state file of its own.
            What::Replaced => {
                volume.recorded.clear();
                volume.file = None;
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;

    fn ends(h: &mut History, at: Micros, session: u32, how: Ending) {
        h.record(at, What::SessionEnding { session: Session(session), how });
        h.record(at, What::SessionEnded { session: Session(session) });
    }

    fn restart(h: &mut History, at: Micros) {
        h.record(at, What::Crashed);
        h.record(at, What::Started);
    }

    #[test]
    fn writers_that_dont_go_together() {
        for (first, second, fits) in [
            (Mode::Exclusive, Mode::Exclusive, false),
            (Mode::Exclusive, Mode::Shared, false),
            (Mode::Shared, Mode::Exclusive, false),
            (Mode::Shared, Mode::Shared, true),
            (Mode::Exclusive, Mode::ReadOnly, true),
        ] {
            let mut h = history();
            attached(&mut h, 1, 1, 1, first);
            attached(&mut h, 2, 2, 2, second);
            if fits { passes(check, &h) } else { caught(check, &h, "beside") }
        }
    }

    #[test]
    fn an_attach_that_was_recorded_and_never_answered_has_the_claim() {
        for claimed in [true, false] {
            let mut h = history();
            attached(&mut h, 1, 1, 1, Mode::Exclusive);
            if claimed {
                h.record(2, What::Claimed { client: Client(2), mode: Mode::Exclusive });
            }
            restart(&mut h, 3);
            attached(&mut h, 4, 2, 2, Mode::Exclusive);
            if claimed { passes(check, &h) } else { caught(check, &h, "grace") }
        }
    }

    #[test]
    fn a_repeated_attach_is_answered_again() {
        let mut h = history();
        attached(&mut h, 1, 1, 1, Mode::Exclusive);
        attached(&mut h, 2, 1, 1, Mode::Exclusive);
        passes(check, &h);
    }

    #[test]
    fn grace_keeps_strangers_out_for_a_lease() {
        let stranger_at = |at, preempt| {
            let mut h = history();
            attached(&mut h, 1, 1, 1, Mode::Exclusive);
            restart(&mut h, 10);
            h.record(at, What::Attached(AttachAnswer { preempt, ..answer(2, 2, Mode::Exclusive) }));
            h
        };
        let lease = history().setup.lease;
        caught(check, &stranger_at(lease - 1_000, false), "grace");
        passes(check, &stranger_at(lease - 1_000, true));
        passes(check, &stranger_at(10 + lease, false));

        let mut back = history();
        attached(&mut back, 1, 1, 1, Mode::Exclusive);
        restart(&mut back, 10);
        back.record(20, What::Attached(AttachAnswer { goes_on: true, ..answer(2, 1, Mode::Exclusive) }));
        passes(check, &back);

        // Recorded, and the target died before it could say so.
        let claimed_at = |at| {
            let mut h = history();
            attached(&mut h, 1, 1, 1, Mode::Exclusive);
            let claim = |h: &mut History| {
                h.record(at, What::RecordStored);
                h.record(at, What::Claimed { client: Client(2), mode: Mode::Exclusive });
            };
            if at < 10 {
                claim(&mut h);
            }
            restart(&mut h, 10);
            if at > 10 {
                claim(&mut h);
            }
            attached(&mut h, 30, 2, 2, Mode::Exclusive);
            h
        };
        passes(check, &claimed_at(5));
        caught(check, &claimed_at(20), "grace");

        let mut closed = history();
        attached(&mut closed, 1, 1, 1, Mode::Exclusive);
        ends(&mut closed, 2, 1, Ending::Closed);
        restart(&mut closed, 10);
        attached(&mut closed, 20, 2, 2, Mode::Exclusive);
        passes(check, &closed);
    }

    #[test]
    fn a_holder_whose_generation_is_past_does_not_go_on() {
        for between in [Mode::Exclusive, Mode::Shared, Mode::ReadOnly] {
            let mut h = history();
            attached(&mut h, 1, 1, 1, Mode::Exclusive);
            ends(&mut h, 2, 1, Ending::LeaseOver);
            attached(&mut h, 3, 2, 2, between);
            ends(&mut h, 4, 2, Ending::Closed);
            h.record(5, What::Attached(AttachAnswer { goes_on: true, ..answer(3, 1, Mode::Exclusive) }));
            if between == Mode::ReadOnly { passes(check, &h) } else { caught(check, &h, "another writer") }
        }
    }

    #[test]
    fn a_replaced_secret_is_refused_for_ever_and_its_takeover_may_be_repeated() {
        let takeover = AttachAnswer {
            secret: SecretNumber(1),
            next_secret: Some(SecretNumber(9)),
            ..answer(2, 2, Mode::Exclusive)
        };
        let mut h = history();
        attached(&mut h, 1, 1, 1, Mode::Exclusive);
        h.record(2, What::Opened { client: Client(2), inherits: Some(Client(1)) });
        ends(&mut h, 3, 1, Ending::TakenOver);
        h.record(4, What::Attached(takeover));
        h.record(5, What::Attached(takeover));
        passes(check, &h);
        ends(&mut h, 6, 2, Ending::LeaseOver);
        let old = AttachAnswer { session: Session(3), secret: SecretNumber(1), preempt: true, ..takeover };
        h.record(7, What::Attached(AttachAnswer { next_secret: None, ..old }));
        caught(check, &h, "had replaced");
    }

    #[test]
    fn another_image_is_not_gone_on_with() {
        let mut h = history();
        attached(&mut h, 1, 1, 1, Mode::Exclusive);
        restart(&mut h, 10);
        let other = AttachAnswer { volume: 2, ..answer(2, 1, Mode::Exclusive) };
        let mut afresh = h.clone();
        afresh.record(20, What::Attached(other));
        passes(check, &afresh);
        h.record(20, What::Attached(AttachAnswer { goes_on: true, ..other }));
        caught(check, &h, "instead of 1");
    }
}

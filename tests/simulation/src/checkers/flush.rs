//! I4 and I5: what a FLUSH, or a command with FUA, acknowledged is on stable storage, and after unflushed
//! changes were, or may have been, lost, no FLUSH of the handle that made them succeeds any more.
//!
//! A FLUSH is judged by the *changes it covers*: those of the same handle that were acknowledged before it was
//! submitted (with those of the handles whose session it took over). It may succeed when
//! - a sync that began after the last of them acted has ended well before it ([`unsynced`]),
//! - none of them fell back at a reboot, before or after ([`lost`]),
//! - no sync failed over one of them ([`failed_sync`]),
//! - the host didn't reboot over one of them, unless a drain had synced it ([`rebooted`]).

use super::Breach;
use super::ledger::{Ledger, NEVER, Record, breach};
use crate::history::{Blocks, Client, Command, History, Kind, Outcome, Stamp, What};

const NAME: &str = "I4+I5 flush";

/// A change at the disk.
#[derive(Clone, Copy, Debug)]
struct Act {
    command: Command,
    blocks: Blocks,
    stamp: Stamp,
    at: usize,
}

/// An act that a reboot took back from one block.
#[derive(Clone, Copy, Debug)]
struct Loss {
    act: Act,
    block: u16,
    at: usize,
}

#[derive(Clone, Copy, Debug)]
struct Sync {
    number: u32,
    began: usize,
    ended: usize,
    ok: bool,
    /// The target heard that it failed.
    heard: bool,
}

#[derive(Debug, Default)]
struct Story {
    acts: Vec<Act>,
    losses: Vec<Loss>,
    syncs: Vec<Sync>,
    reboots: Vec<usize>,
    crashes: Vec<usize>,
    drains: Vec<usize>,
    /// Successor, predecessor, and where the successor was first attached.
    heirs: Vec<(Client, Client, usize)>,
}

/// An acknowledged change that isn't stable by itself.
#[derive(Clone, Copy, Debug)]
struct Change {
    command: Command,
    client: Client,
    acknowledged: usize,
    /// Its last act before it was acknowledged.
    acted: usize,
}

/// # Errors
/// A FLUSH, or a command with FUA, was acknowledged that should have failed.
pub fn check(history: &History, ledger: &Ledger) -> Result<(), Breach> {
    let story = Story::read(history, ledger);
    let found = |(position, what)| Err(breach(NAME, history, position, what));
    for loss in &story.losses {
        let Some(record) = ledger.command(loss.act.command) else { continue };
        let stable = record.fua || history.setup.write_through;
        if stable && record.is(Outcome::Ok) && !story.survives(loss) {
            let what = format!("{:?} was acknowledged as stable and lost block {}", loss.act.command, loss.block);
            return found((loss.at, what));
        }
    }
    if history.setup.write_through {
        return Ok(());
    }
    let changes = story.changes(ledger);
    for (command, flush) in ledger.commands().filter(|(_, r)| r.kind == Kind::Flush && r.is(Outcome::Ok)) {
        let covered = || {
            changes.iter().filter(|change| {
                change.acknowledged < flush.invoked
                    && (change.client == flush.client || story.inherited(flush.client, change.client).is_some())
            })
        };
        for change in covered() {
            let since = story.inherited(flush.client, change.client).unwrap_or(0);
            let judged = [
                unsynced(&story, change, flush),
                lost(&story, change, flush, since),
                failed_sync(&story, change, flush, since),
                rebooted(&story, ledger, change, flush, since),
            ];
            if let Some(why) = judged.into_iter().flatten().next() {
                let what = format!("{command:?} acknowledged a flush of {:?}, {why}", change.command);
                return found((flush.completed, what));
            }
        }
    }
    Ok(())
}

/// No sync between the change and the answer. (After a reboot other rules judge.)
fn unsynced(story: &Story, change: &Change, flush: &Record) -> Option<String> {
    let rebooted = story.reboots.iter().any(|at| (change.acted..flush.completed).contains(at));
    let synced = story.syncs.iter().any(|s| s.ok && s.began > change.acted && s.ended < flush.completed);
    (!rebooted && !synced).then(|| "which no sync had covered".into())
}

fn lost(story: &Story, change: &Change, flush: &Record, since: usize) -> Option<String> {
    let lost = |loss: &&Loss| {
        loss.act.command == change.command && !story.survives(loss) && (loss.at > since || flush.completed < loss.at)
    };
    story.losses.iter().find(lost).map(|loss| format!("which a reboot took back from block {}", loss.block))
}

fn failed_sync(story: &Story, change: &Change, flush: &Record, since: usize) -> Option<String> {
    let over = |failed: &&Sync| {
        let before = |s: &Sync| s.ok && s.began > change.acted && s.ended < failed.ended;
        !failed.ok
            && failed.ended > since
            && change.acknowledged < failed.began
            && failed.ended < flush.completed
            && !story.is_forgotten(failed, flush)
            && !story.syncs.iter().any(before)
    };
    story.syncs.iter().find(over).map(|failed| format!("over which sync {} had failed", failed.number))
}

fn rebooted(story: &Story, ledger: &Ledger, change: &Change, flush: &Record, since: usize) -> Option<String> {
    let over = |reboot: &&usize| {
        let reboot = **reboot;
        let drained = story.drains.iter().any(|drain| {
            let synced = |s: &Sync| s.ok && s.began > change.acted && s.ended < *drain;
            *drain < reboot && story.syncs.iter().any(synced)
        });
        // An answer that was on its way when the host went down still counts.
        let flushed = ledger.commands().any(|(_, earlier)| {
            // A successor's is issued when the successor is attached: then nothing of its predecessor acts any more,
            // whatever a predecessor that slept is told, and when.
            let own = change.client == flush.client;
            let (issued, done) =
                if own { (earlier.invoked, change.acknowledged) } else { (earlier.last_assigned, change.acted) };
            earlier.kind == Kind::Flush
                && earlier.is(Outcome::Ok)
                && earlier.client == flush.client
                && issued > done
                && earlier.last_assigned < reboot
                && earlier.completed < flush.last_assigned
        });
        let assigned = flush.last_assigned != NEVER && flush.last_assigned > reboot;
        reboot > since && change.acknowledged < reboot && assigned && !drained && !flushed
    };
    story.reboots.iter().find(over).map(|_| "over which the host had rebooted".into())
}

impl Story {
    fn read(history: &History, ledger: &Ledger) -> Self {
        let mut it = Self::default();
        // The acts on each block that stand, in their order.
        let mut standing: Vec<Vec<Act>> = vec![Vec::new(); usize::from(history.setup.blocks)];
        for (position, event) in history.events.iter().enumerate() {
            match event.what {
                What::Applied { ticket, blocks, stamp } => {
                    let command = ledger.place_of(ticket).and_then(|place| ledger.at(place));
                    let Some(command) = command else { continue };
                    let act = Act { command, blocks, stamp, at: position };
                    it.acts.push(act);
                    for block in blocks.each() {
                        if let Some(acts) = standing.get_mut(usize::from(block)) {
                            acts.push(act);
                        }
                    }
                }
                What::Lost { block, now, .. } => {
                    let Some(acts) = standing.get_mut(usize::from(block)) else { continue };
                    let keep = acts.iter().rposition(|act| act.stamp == now).map_or(0, |index| index + 1);
                    it.losses.extend(acts.drain(keep..).map(|act| Loss { act, block, at: position }));
                }
                What::SyncBegan { sync } => {
                    let (ended, ok, heard) = (NEVER, false, false);
                    it.syncs.push(Sync { number: sync, began: position, ended, ok, heard });
                }
                What::SyncEnded { sync, ok } => {
                    if let Some(known) = it.syncs.iter_mut().rev().find(|known| known.number == sync) {
                        (known.ended, known.ok) = (position, ok);
                    }
                }
                What::SyncFailureHeard { sync } => {
                    it.syncs.iter_mut().filter(|known| known.number == sync).for_each(|known| known.heard = true);
                }
                What::Crashed => it.crashes.push(position),
                What::Replaced => standing.iter_mut().for_each(Vec::clear),
                What::Rebooted => it.reboots.push(position),
                What::DrainSynced => it.drains.push(position),
                What::Opened { client, inherits: Some(from) } => it.heirs.push((client, from, NEVER)),
                What::Attached(answer) => {
                    let heir = it.heirs.iter_mut().find(|(client, _, at)| *client == answer.client && *at == NEVER);
                    if let Some((_, _, at)) = heir {
                        *at = position;
                    }
                }
                _ => {}
            }
        }
        it.syncs.retain(|sync| sync.ended != NEVER);
        it
    }

    fn changes(&self, ledger: &Ledger) -> Vec<Change> {
        let acknowledged = ledger.commands().filter(|(_, r)| r.kind.changes() && !r.fua && r.is(Outcome::Ok));
        let change = |(command, record): (Command, &Record)| {
            let acts = self.acts.iter().filter(|act| act.command == command && act.at < record.completed);
            let acted = acts.map(|act| act.at).max()?;
            Some(Change { command, client: record.client, acknowledged: record.completed, acted })
        };
        acknowledged.filter_map(change).collect()
    }

    /// Whether the command acted on the block again after the reboot that took its act back.
    fn survives(&self, loss: &Loss) -> bool {
        let again = |act: &Act| act.command == loss.act.command && act.blocks.holds(loss.block) && act.at > loss.at;
        self.acts.iter().any(again)
    }

    /// The target's process died before it heard of the failure: nobody knows of it, the kernel neither, which tells
    /// of it once.
    fn is_forgotten(&self, failed: &Sync, flush: &Record) -> bool {
        !failed.heard && self.crashes.iter().any(|crash| (failed.ended..flush.completed).contains(crash))
    }

    /// From which position on the client answers for the other's changes, having taken over its session: what
    /// was lost before it can't know.
    fn inherited(&self, client: Client, from: Client) -> Option<usize> {
        let (_, parent, at) = self.heirs.iter().find(|(heir, ..)| *heir == client)?;
        if *parent == from { Some(*at) } else { self.inherited(*parent, from).map(|_| *at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkers::testing::*;
    use crate::history::{Mode, Setup};

    fn acts(h: &mut History, at: u64, command: u32, stamp: u32) {
        let place = place(1, 0, u64::from(command));
        submitted(h, at, command, place, Kind::Write, one(0));
        applied(h, at, command, one(0), stamp);
        ended(h, at, command);
    }

    fn wrote(h: &mut History, at: u64, client: u32, command: u32, stamp: u32) {
        invoked(h, at, client, command, Kind::Write, one(0), stamp);
        assign(h, at, command, place(1, 0, u64::from(command)));
        acts(h, at, command, stamp);
        completed(h, at, command, Outcome::Ok);
    }

    fn synced(h: &mut History, at: u64, sync: u32, ok: bool) {
        h.record(at, What::SyncBegan { sync });
        h.record(at, What::SyncEnded { sync, ok });
    }

    fn flush(h: &mut History, at: u64, client: u32, command: u32, table: u64, sync: Option<bool>, outcome: Outcome) {
        invoked(h, at, client, command, Kind::Flush, one(0), 0);
        assign(h, at, command, place(table, 1, u64::from(command)));
        if let Some(ok) = sync {
            synced(h, at, command, ok);
        }
        completed(h, at, command, outcome);
    }

    fn fell(h: &mut History, at: u64, was: u32, now: u32) {
        h.record(at, What::Rebooted);
        h.record(at, What::Lost { block: 0, was: Stamp(was), now: Stamp(now) });
    }

    #[test]
    fn a_flush_needs_a_sync_after_the_change() {
        let mut h = history();
        wrote(&mut h, 1, 1, 1, 11);
        flush(&mut h, 2, 1, 2, 1, Some(true), Outcome::Ok);
        flush(&mut h, 3, 1, 3, 1, None, Outcome::Ok);
        passes(check, &h);
        wrote(&mut h, 4, 1, 4, 12);
        flush(&mut h, 5, 1, 5, 1, None, Outcome::Ok);
        caught(check, &h, "no sync had covered");
    }

    #[test]
    fn a_sync_that_began_before_the_change_is_none() {
        let mut h = history();
        h.record(0, What::SyncBegan { sync: 9 });
        wrote(&mut h, 1, 1, 1, 11);
        h.record(2, What::SyncEnded { sync: 9, ok: true });
        flush(&mut h, 2, 1, 2, 1, None, Outcome::Ok);
        caught(check, &h, "no sync had covered");
    }

    #[test]
    fn others_flushes_and_unacknowledged_writes_are_not_covered() {
        let mut h = history();
        invoked(&mut h, 1, 1, 1, Kind::Write, one(0), 11);
        assign(&mut h, 1, 1, place(1, 0, 1));
        acts(&mut h, 1, 1, 11);
        flush(&mut h, 2, 1, 2, 1, None, Outcome::Ok);
        completed(&mut h, 3, 1, Outcome::Ok);
        flush(&mut h, 4, 2, 3, 1, None, Outcome::Ok);
        passes(check, &h);
    }

    #[test]
    fn flushed_and_lost() {
        let mut h = history();
        wrote(&mut h, 1, 1, 1, 11);
        flush(&mut h, 2, 1, 2, 1, Some(true), Outcome::Ok);
        wrote(&mut h, 3, 1, 3, 12);
        let mut unflushed = h.clone();
        fell(&mut unflushed, 4, 12, 11);
        passes(check, &unflushed);
        fell(&mut h, 4, 12, 0);
        caught(check, &h, "took back from block 0");
    }

    #[test]
    fn lost_and_written_again_by_its_replay() {
        let mut h = history();
        invoked(&mut h, 1, 1, 1, Kind::Write, one(0), 11);
        assign(&mut h, 1, 1, place(1, 0, 1));
        acts(&mut h, 1, 1, 11);
        fell(&mut h, 2, 11, 0);
        assign(&mut h, 3, 1, place(2, 0, 1));
        submitted(&mut h, 3, 7, place(2, 0, 1), Kind::Write, one(0));
        applied(&mut h, 3, 7, one(0), 11);
        completed(&mut h, 4, 1, Outcome::Ok);
        flush(&mut h, 5, 1, 2, 2, Some(true), Outcome::Ok);
        passes(check, &h);
    }

    #[test]
    fn what_another_image_loses_was_nobodys_on_the_first() {
        let mut h = history();
        wrote(&mut h, 1, 1, 1, 11);
        flush(&mut h, 2, 1, 2, 1, Some(true), Outcome::Ok);
        h.record(3, What::Replaced);
        wrote(&mut h, 4, 2, 3, 12);
        fell(&mut h, 5, 12, 0);
        passes(check, &h);
    }

    #[test]
    fn what_is_acknowledged_as_stable_stays() {
        for write_through in [false, true] {
            let mut h = History::new(Setup { write_through, ..Setup::default() });
            wrote(&mut h, 1, 1, 1, 11);
            fell(&mut h, 2, 11, 0);
            if write_through { caught(check, &h, "as stable") } else { passes(check, &h) }
        }
        let mut h = history();
        let (client, command, stamp) = (Client(1), Command(1), Stamp(11));
        let (kind, blocks, expected) = (Kind::Write, one(0), Stamp::ZERO);
        h.record(1, What::Invoked { client, command, kind, fua: true, blocks, stamp, expected });
        assign(&mut h, 1, 1, place(1, 0, 1));
        acts(&mut h, 1, 1, 11);
        completed(&mut h, 2, 1, Outcome::Ok);
        fell(&mut h, 3, 11, 0);
        caught(check, &h, "as stable");
    }

    #[test]
    fn after_a_failed_sync_every_flush_fails() {
        let after = |outcome| {
            let mut h = history();
            wrote(&mut h, 1, 1, 1, 11);
            flush(&mut h, 2, 1, 2, 1, Some(false), Outcome::Failed);
            flush(&mut h, 3, 1, 3, 1, Some(true), outcome);
            h
        };
        passes(check, &after(Outcome::Failed));
        caught(check, &after(Outcome::Ok), "sync 2 had failed");
    }

    #[test]
    fn a_failure_that_died_with_the_process_is_known_to_nobody() {
        let after = |heard: bool| {
            let mut h = history();
            wrote(&mut h, 1, 1, 1, 11);
            synced(&mut h, 2, 77, false);
            if heard {
                h.record(3, What::SyncFailureHeard { sync: 77 });
            }
            h.record(4, What::Crashed);
            h.record(5, What::Started);
            flush(&mut h, 6, 1, 3, 2, Some(true), Outcome::Ok);
            h
        };
        passes(check, &after(false));
        caught(check, &after(true), "sync 77 had failed");
    }

    #[test]
    fn a_drain_covers_a_change_that_is_acknowledged_after_it() {
        let mut h = history();
        invoked(&mut h, 1, 1, 1, Kind::Write, one(0), 11);
        assign(&mut h, 1, 1, place(1, 0, 1));
        acts(&mut h, 1, 1, 11);
        synced(&mut h, 2, 77, true);
        h.record(2, What::DrainSynced);
        completed(&mut h, 3, 1, Outcome::Ok);
        h.record(4, What::Rebooted);
        flush(&mut h, 5, 1, 3, 2, Some(true), Outcome::Ok);
        passes(check, &h);
    }

    #[test]
    fn a_failed_sync_concerns_only_unflushed_changes() {
        let mut h = history();
        wrote(&mut h, 1, 1, 1, 11);
        flush(&mut h, 2, 1, 2, 1, Some(true), Outcome::Ok);
        synced(&mut h, 3, 77, false);
        flush(&mut h, 4, 1, 3, 1, Some(true), Outcome::Ok);
        passes(check, &h);
        wrote(&mut h, 5, 1, 4, 12);
        synced(&mut h, 6, 78, false);
        flush(&mut h, 7, 1, 5, 1, Some(true), Outcome::Ok);
        caught(check, &h, "sync 78 had failed");
    }

    #[test]
    fn after_a_reboot_every_flush_of_unflushed_changes_fails() {
        let rebooted_with = |flushed: bool, drained: bool, outcome| {
            let mut h = history();
            wrote(&mut h, 1, 1, 1, 11);
            if flushed {
                flush(&mut h, 2, 1, 2, 1, Some(true), Outcome::Ok);
            }
            if drained {
                synced(&mut h, 3, 78, true);
                h.record(3, What::DrainSynced);
            }
            h.record(4, What::Rebooted);
            flush(&mut h, 5, 1, 3, 2, Some(true), outcome);
            h
        };
        caught(check, &rebooted_with(false, false, Outcome::Ok), "rebooted");
        passes(check, &rebooted_with(false, false, Outcome::Failed));
        passes(check, &rebooted_with(true, false, Outcome::Ok));
        passes(check, &rebooted_with(false, true, Outcome::Ok));
    }

    #[test]
    fn a_flush_answered_on_the_wire_at_the_reboot_counts() {
        let mut h = history();
        wrote(&mut h, 1, 1, 1, 11);
        invoked(&mut h, 2, 1, 2, Kind::Flush, one(0), 0);
        assign(&mut h, 2, 2, place(1, 1, 2));
        synced(&mut h, 3, 1, true);
        h.record(4, What::Rebooted);
        completed(&mut h, 5, 2, Outcome::Ok);
        flush(&mut h, 6, 1, 3, 2, Some(true), Outcome::Ok);
        passes(check, &h);
    }

    #[test]
    fn a_takeover_answers_for_its_predecessors_changes_from_then_on() {
        let took_over = |fails_at: u64| {
            let mut h = history();
            wrote(&mut h, 1, 1, 1, 11);
            if fails_at == 2 {
                synced(&mut h, 2, 77, false);
            }
            h.record(3, What::Opened { client: Client(2), inherits: Some(Client(1)) });
            attached(&mut h, 3, 2, 2, Mode::Exclusive);
            if fails_at == 4 {
                synced(&mut h, 4, 77, false);
            }
            flush(&mut h, 5, 2, 2, 2, Some(true), Outcome::Ok);
            h
        };
        passes(check, &took_over(2));
        caught(check, &took_over(4), "sync 77 had failed");
    }
}

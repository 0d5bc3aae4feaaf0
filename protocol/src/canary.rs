//! Rules that can be broken on purpose, to see the simulator's checkers catch it.
//!
//! With the cargo feature `canary` one rule at a time can be switched off while the program runs. Without the
//! feature [`broken`] is a constant `false`, and nothing of this is left in the code. Each rule asks in the
//! room that it lives in; rules that live in a driver (the drain, a buffer's way back) are asked for by the
//! simulator's driver.

#[cfg(feature = "canary")]
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

macro_rules! canaries {
    ($($(#[$doc:meta])* $name:ident = $label:literal;)*) => {
        /// A rule of DESIGN.md, broken.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u32)]
        pub enum Canary {
            $($(#[$doc])* $name,)*
        }

        impl Canary {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Name on command lines and in reports.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)*
                }
            }
        }
    };
}

canaries! {
    /// I2: the target takes frames of an older epoch.
    EpochUncheckedOnArrival = "epoch-unchecked-on-arrival";
    /// I2: the target gives parked commands to storage though their path, or their session, is over.
    EpochUncheckedAtSubmission = "epoch-unchecked-at-submission";
    /// I2: the target lets a path take over with an epoch that isn't greater.
    StaleEpochActivated = "stale-epoch-activated";
    /// I3: a rail (driver) calls a path drained while its requests are still at the device.
    DrainSkipped = "drain-skipped";
    /// I3: a driver gives a buffer back before the device is done with it.
    BufferBackEarly = "buffer-back-early";
    /// I1: the target executes a finished change again when it is repeated.
    ReplyCacheOff = "reply-cache-off";
    /// The target takes an activation that names another slot table.
    InstanceIgnored = "instance-ignored";
    /// I1: the target says *unknown* of a command that is parked or at storage, and runs it again.
    RunningRunAgain = "running-run-again";
    /// I1: the target doesn't compare a repetition with its original.
    RetryNotCompared = "retry-not-compared";
    /// I6: the initiator uses a slot more than was granted.
    CreditOffByOne = "credit-off-by-one";
    /// I6: the target takes a shrink for settled before it was acknowledged.
    ShrinkUnacknowledged = "shrink-unacknowledged";
    /// I5: the initiator flushes on after the target's host rebooted.
    FlushIgnoresBootId = "flush-ignores-boot-id";
    /// I5: a FLUSH succeeds though a sync failed since the write.
    FlushForgetsFailedSync = "flush-forgets-failed-sync";
    /// I2: a preempt is answered while the old session's commands are at storage.
    PreemptAnsweredEarly = "preempt-answered-early";
    /// A takeover leaves the secret that it replaces in force.
    TakeoverKeepsSecret = "takeover-keeps-secret";
    /// The target lets anybody attach right after its start.
    GraceIgnored = "grace-ignored";
    /// The target takes a session back though another writer was there since.
    GenerationIgnored = "generation-ignored";
    /// The target doesn't compare the volume with the one that is expected.
    VolumeUnchecked = "volume-unchecked";
    /// I7: a payload's checksum isn't looked at.
    CrcUnchecked = "crc-unchecked";
    /// I1: the initiator completes a command of which the target knows nothing.
    UnknownCompleted = "unknown-completed";
    /// I1: the initiator takes replies of an older path.
    StaleReplyTaken = "stale-reply-taken";
    /// I3, I7: the initiator goes on with a reply whose payload was half there when its path was lost.
    HalfReplyKept = "half-reply-kept";
    /// A shared writer replays changes of a lost session.
    SharedChangeReplayed = "shared-change-replayed";
    /// COMPARE AND WRITE of a lost session is replayed.
    CompareAndWriteReplayed = "compare-and-write-replayed";
    /// I2: the end of a lease is announced while the session's commands are at storage.
    LeaseEndNotAwaited = "lease-end-not-awaited";
}

#[cfg(feature = "canary")]
static BROKEN: AtomicU32 = AtomicU32::new(u32::MAX);

/// Breaks one rule in this process, or none.
#[cfg(feature = "canary")]
pub fn break_rule(canary: Option<Canary>) {
    BROKEN.store(canary.map_or(u32::MAX, |c| c as u32), Relaxed);
}

/// Whether this rule is broken.
#[cfg(feature = "canary")]
#[inline]
#[must_use]
pub fn broken(canary: Canary) -> bool {
    BROKEN.load(Relaxed) == canary as u32
}

/// Whether this rule is broken: never, without the feature.
#[cfg(not(feature = "canary"))]
#[inline(always)]
#[must_use]
pub const fn broken(_: Canary) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_canary_has_a_name_of_its_own_and_none_is_broken_by_default() {
        for (i, canary) in Canary::ALL.iter().enumerate() {
            assert!(Canary::ALL[..i].iter().all(|other| other.name() != canary.name()));
            assert!(!broken(*canary));
        }
    }
}

//! Takeover: a restarted front end takes the place of its own old session by replacing its secret.
//!
//! ```text
//!   predecessor          successor                       target
//!        | secret a            | secret a, stores b beside it |
//!        |                     | ATTACH takeover a → b        |
//!        |                     |----------------------------->|  replaces a by b; ends the old session (I2)
//!        |                     |                     ATTACHED |  when b is stored and the end is confirmed
//!        |                     |<-----------------------------|
//!        | ACTIVATE or ATTACH with a                          |
//!        |--------------------------------------------------->|
//!        |                                  REFUSED preempted |  for ever
//!        |<---------------------------------------------------|
//! ```

use super::record::{Digest, MAX_REPLACED, Record};
use super::refusal::Refusal;
use crate::canary::{Canary, broken};
use crate::ids::SessionId;

/// Whether a secret that is shown opens `session`, whose secret is `present`; nothing if nobody has it.
pub(super) fn check(
    record: &Record,
    session: SessionId,
    present: Option<&Digest>,
    shown: &Digest,
) -> Result<(), Refusal> {
    if was_replaced(record, shown) {
        return if broken(Canary::TakeoverKeepsSecret) { Ok(()) } else { Err(Refusal::TakenOver { session }) };
    }
    match present {
        Some(present) if !present.matches(shown) => Err(Refusal::BadSecret { session }),
        _ => Ok(()),
    }
}

/// Whether a takeover has replaced this secret.
pub(super) fn was_replaced(record: &Record, shown: &Digest) -> bool {
    record.replaced.iter().any(|digest| digest.matches(shown))
}

/// A takeover replaces a secret.
pub(super) fn replace(record: &mut Record, secret: Digest) {
    if record.replaced.len() == MAX_REPLACED {
        record.replaced.remove(0);
    }
    record.replaced.push(secret);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::VolumeId;

    const SESSION: SessionId = SessionId([1; 16]);

    #[test]
    fn a_replaced_secret_is_told_from_a_wrong_one() {
        let mut record = Record::new(VolumeId([1; 16]));
        let secrets = [1, 2, 3].map(|n| Digest([n; 32]));
        replace(&mut record, secrets[0]);
        let check = |shown: usize| check(&record, SESSION, Some(&secrets[1]), &secrets[shown]);
        assert_eq!(check(1), Ok(()));
        assert_eq!(check(0), Err(Refusal::TakenOver { session: SESSION }));
        assert_eq!(check(2), Err(Refusal::BadSecret { session: SESSION }));
        let nobody = super::check(&record, SESSION, None, &secrets[0]);
        assert_eq!(nobody, Err(Refusal::TakenOver { session: SESSION }), "nobody holds the volume any more");
    }

    #[test]
    fn i8_the_memory_of_replaced_secrets_is_bounded() {
        let mut record = Record::new(VolumeId([1; 16]));
        for n in 0..100 {
            replace(&mut record, Digest([n; 32]));
        }
        assert_eq!(record.replaced.len(), MAX_REPLACED);
        assert!(was_replaced(&record, &Digest([99; 32])));
    }
}

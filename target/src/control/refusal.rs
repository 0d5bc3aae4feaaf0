//! What an initiator is told when its handshake ends.

use twinrail_protocol::{Status, target};

/// Why a handshake ends: a status for the program, a text for the person.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} ({status})")]
pub struct Refusal {
    /// Why.
    pub status: Status,
    /// The thing's name and the remedy.
    pub text: String,
    /// When to try again, in milliseconds; 0 says nothing.
    pub retry_after_ms: u32,
}

impl Refusal {
    /// A refusal that doesn't go away by itself.
    #[must_use]
    pub fn new(status: Status, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), retry_after_ms: 0 }
    }

    /// The same, but it is worth another try after that many milliseconds.
    #[must_use]
    pub fn retry_after_ms(self, retry_after_ms: u32) -> Self {
        Self { retry_after_ms, ..self }
    }

    /// What the rules of sessions and volumes say, about the volume with this name.
    #[must_use]
    pub fn about(refusal: &target::Refusal, volume: &str) -> Self {
        Self { text: refusal.about(volume).to_string(), ..Self::from(refusal) }
    }
}

impl From<&target::Refusal> for Refusal {
    fn from(refusal: &target::Refusal) -> Self {
        Self { status: refusal.status(), text: refusal.to_string(), retry_after_ms: refusal.retry_after_ms() }
    }
}

impl From<target::Refusal> for Refusal {
    fn from(refusal: target::Refusal) -> Self {
        Self::from(&refusal)
    }
}

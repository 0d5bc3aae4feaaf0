//! Stories of one screen each, on the machinery of the simulator: the bad moments that the design was made for.
//!
//! Each ends with everything healed, every command answered and every checker content ([`Scenario::end`]); what
//! it expects beyond that stands in the story.

mod credits;
mod durability;
mod holders;
mod loss;
mod switching;

use twinrail_protocol::wire::Rail;
use twinrail_simulation::clock::{MS, SECOND};
use twinrail_simulation::faults::{Fault, Towards};
use twinrail_simulation::ground::Process;
use twinrail_simulation::history::{Mode, Outcome, Side, What};
use twinrail_simulation::scenario::{A, B, Scenario, Story, block, first};

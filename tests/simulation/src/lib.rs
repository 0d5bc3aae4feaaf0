//! Twinrail under simulation: the core of both sides in one process, under virtual time and a seed.
//!
//! A world has a target with a disk, some initiators with their callers, and cables between them
//! ([`rails`]). All that decides is the real core; [`target`] and [`initiator`] only carry things to and fro,
//! as the real drivers do. What happened is written to a [`history`], which the [`checkers`] hold against the
//! invariants. A [`plan`] is drawn from a seed and holds every option and fault of a run, so that a seed
//! repeats a run exactly.

pub mod channel;
pub mod checkers;
pub mod clock;
pub mod coverage;
pub mod disk;
pub mod faults;
pub mod ground;
pub mod history;
pub mod initiator;
pub mod memory;
pub mod names;
pub mod plan;
pub mod rails;
pub mod random;
pub mod run;
pub mod scenario;
pub mod stamps;
pub mod target;
pub mod trace;

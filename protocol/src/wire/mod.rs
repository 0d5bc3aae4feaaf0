//! Byte layouts of version 1 (SPEC.md, "Frames" and "Handshake"). All numbers are little-endian; every
//! reserved byte is zero and a receiver refuses any other value.

mod codec;
mod extent;
mod fault;
mod frame;
mod handshake;

pub use codec::{Reader, Writer};
pub use extent::{Extent, ExtentFlags};
pub use fault::Fault;
pub use frame::{
    Command, Control, ControlKind, Credits, EventCode, Frame, HeaderBytes, Hello, Payload, Placement, Rail, Reply,
    Transfer, VERSION,
};
pub use handshake::{
    Activate, Activated, Attach, AttachFlags, AttachMode, Attached, Auth, Family, Features, Handshake, Portal, Refused,
    Standby, Standing, Verdict, VerdictKind, VolumeFlags, Welcome,
};

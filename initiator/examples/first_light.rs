//! The front page of the library: a block written, made durable, and read back.

use twinrail_initiator::{Options, VolumeUrl, blocking};

/// Writes a block, makes it durable, reads it back.
pub(crate) fn first_light(url: &VolumeUrl) -> Result<(), Box<dyn std::error::Error>> {
    let volume = blocking::Volume::connect(url, Options::default())?;
    let mut buffer = volume.buffer(4096)?;
    buffer.fill(0x42);
    // A call owns its buffer while it lasts, and gives it back with its result.
    let (mut buffer, written) = volume.write(0, buffer);
    written?;
    volume.flush()?;
    buffer.fill(0);
    let (buffer, read) = volume.read(0, buffer);
    read?;
    println!("{url}: byte 0 is {:#04x} now", buffer[0]);
    volume.close()?;
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("which volume? twinrail://host[:port]/volume")?;
    first_light(&url.parse()?)
}

//! `info`: what a volume is, and what was agreed on with its target.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::Context;
use serde::Serialize;
use twinrail_initiator::{Session, VolumeFlags, VolumeUrl};
use twinrail_protocol::wire::{Family, Portal};

use crate::attach::{self, AttachArguments, Mode};
use crate::size::Shown;
use crate::{metrics, output};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The volume: twinrail://host[:port]/volume
    url: VolumeUrl,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    attach: AttachArguments,
}

/// Everything that there is to tell.
#[derive(Serialize)]
struct Report {
    url: String,
    target_name: String,
    id: String,
    generation: u64,
    size_bytes: u64,
    logical_block_bytes: u32,
    physical_block_bytes: u32,
    max_transfer_bytes: u32,
    flags: Vec<&'static str>,
    failed_syncs: u64,
    mode: &'static str,
    session: String,
    lease_ms: u32,
    queues: usize,
    /// Of each queue.
    depth: u16,
    granted_slots: u16,
    data_window_bytes: u64,
    in_capsule_bytes: u32,
    rail: &'static str,
    congestion: Option<String>,
    rdma_portals: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Arguments { url, json, attach } = arguments;
    let report = ask(url, attach)?;
    output::tell(&report, *json)
}

fn ask(url: &VolumeUrl, arguments: &AttachArguments) -> anyhow::Result<Report> {
    let metrics = metrics::new()?;
    let (session, queues) = Session::attach(url, &arguments.options(Mode::ReadOnly), &metrics)?;
    let (info, first) = (session.info(), queues.first().context("the target gives no queue")?);
    let credits = first.credits();
    let report = Report {
        url: url.to_string(),
        target_name: session.target_name().to_owned(),
        id: info.id.to_string(),
        generation: info.generation,
        size_bytes: info.geometry.size,
        logical_block_bytes: info.geometry.logical_block,
        physical_block_bytes: info.geometry.physical_block,
        max_transfer_bytes: info.geometry.max_transfer,
        flags: flags(info.flags),
        failed_syncs: info.failed_syncs,
        mode: session.mode().name(),
        session: session.id().to_string(),
        lease_ms: info.lease_ms,
        queues: queues.len(),
        depth: first.depth(),
        granted_slots: credits.granted_slots,
        data_window_bytes: credits.data_window.into(),
        in_capsule_bytes: first.in_capsule(),
        rail: first.rail().map_or("none", |rail| rail.name()),
        congestion: first.congestion().map(str::to_owned),
        rdma_portals: info.portals.iter().filter_map(address).map(|address| address.to_string()).collect(),
    };
    attach::close(queues);
    Ok(report)
}

fn flags(flags: VolumeFlags) -> Vec<&'static str> {
    let names = [
        (VolumeFlags::READ_ONLY, "read-only"),
        (VolumeFlags::WRITE_THROUGH, "write-through"),
        (VolumeFlags::ROTATIONAL, "rotational"),
        (VolumeFlags::DISCARD, "discard"),
        (VolumeFlags::VOLATILE, "volatile"),
    ];
    names.into_iter().filter(|(flag, _)| flags.has(*flag)).map(|(_, name)| name).collect()
}

fn address(portal: &Portal) -> Option<SocketAddr> {
    let bytes = portal.address;
    let address: IpAddr = match portal.family {
        Family::V4 => Ipv4Addr::from(*bytes.first_chunk::<4>()?).into(),
        Family::V6 => Ipv6Addr::from(bytes).into(),
        _ => return None,
    };
    Some(SocketAddr::new(address, portal.port))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_none = |words: String| if words.is_empty() { "none".to_owned() } else { words };
        let congestion = self.congestion.as_deref().unwrap_or("none");
        writeln!(f, "volume      {}", self.url)?;
        writeln!(f, "id          {}, generation {}", self.id, self.generation)?;
        writeln!(f, "size        {} bytes ({})", self.size_bytes, Shown(self.size_bytes))?;
        let (logical, physical) = (self.logical_block_bytes, self.physical_block_bytes);
        writeln!(f, "blocks      {logical} bytes logical, {physical} physical")?;
        writeln!(f, "transfer    {} at most", Shown(self.max_transfer_bytes.into()))?;
        writeln!(f, "flags       {}", or_none(self.flags.join(", ")))?;
        writeln!(f, "syncs       {} failed so far", self.failed_syncs)?;
        writeln!(f, "target      {}", self.target_name)?;
        writeln!(f, "session     {}, {}, lease {} ms", self.session, self.mode, self.lease_ms)?;
        let (depth, granted) = (self.depth, self.granted_slots);
        writeln!(f, "queues      {}, each {depth} deep, of which {granted} are granted", self.queues)?;
        let (capsule, window) = (Shown(self.in_capsule_bytes.into()), Shown(self.data_window_bytes));
        writeln!(f, "capsules    {capsule} of payload; data window {window}")?;
        writeln!(f, "rail        {}, congestion control {congestion}", self.rail)?;
        write!(f, "rdma        {}", or_none(self.rdma_portals.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_have_names() {
        let set = VolumeFlags::WRITE_THROUGH.with(VolumeFlags::DISCARD);
        assert_eq!(flags(set), ["write-through", "discard"]);
        assert!(flags(VolumeFlags::default()).is_empty());
    }

    #[test]
    fn portals_are_addresses() {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&[10, 1, 0, 7]);
        let portal = Portal { family: Family::V4, port: 4450, address: bytes };
        assert_eq!(address(&portal).unwrap().to_string(), "10.1.0.7:4450");
        bytes = [0; 16];
        bytes[15] = 1;
        let portal = Portal { family: Family::V6, port: 4450, address: bytes };
        assert_eq!(address(&portal).unwrap().to_string(), "[::1]:4450");
    }
}

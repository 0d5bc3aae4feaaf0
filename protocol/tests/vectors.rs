//! The test vectors are what the generator writes, and this crate reads them as they say.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

#[path = "../examples/vectors/catalogue.rs"]
mod catalogue;

use std::collections::HashSet;

use catalogue::{GEOMETRY, describe, describe_handshake, describe_hello, files, hex};
use serde_json::Value;
use twinrail_protocol::ids::{Epoch, Instance};
use twinrail_protocol::limits::HEADER_LEN;
use twinrail_protocol::target::{Intake, Queue, QueueOptions, Start, Step};
use twinrail_protocol::wire::{Credits, Extent, Fault, Frame, Handshake, Hello, Rail};
use twinrail_protocol::{Status, crc32c};

fn read(file: &str) -> String {
    std::fs::read_to_string(format!("{}/vectors/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn vectors(file: &str) -> Vec<Value> {
    let content: Value = serde_json::from_str(&read(file)).unwrap();
    let vectors = content["vectors"].as_array().unwrap().clone();
    assert!(vectors.len() >= 40, "{file} has only {} vectors", vectors.len());
    let names: HashSet<&str> = vectors.iter().map(|v| v["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), vectors.len(), "{file} has a name twice");
    vectors
}

fn bytes(vector: &Value) -> Vec<u8> {
    let hex = vector["hex"].as_str().unwrap();
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn status(vector: &Value) -> Status {
    let status = Status(vector["status"].as_u64().unwrap().try_into().unwrap());
    assert_eq!(status.name(), vector["status_name"].as_str().unwrap());
    status
}

/// The fields of the frame, and the bytes that it has when it is encoded anew.
fn inspect(vector: &Value) -> Result<(Value, Vec<u8>), Fault> {
    let bytes = bytes(vector);
    let layer = vector["layer"].as_str().unwrap();
    if layer == "extents" {
        return inspect_extents(&bytes, vector["asked"].as_u64().unwrap());
    }
    let header = bytes.first_chunk::<HEADER_LEN>().unwrap();
    let payload = &bytes[HEADER_LEN..];
    if layer == "hello" {
        let hello = Hello::decode(header)?;
        let name = hello.name.text(payload)?;
        return Ok((describe_hello(&hello, name), [&hello.encode()[..], name.as_bytes()].concat()));
    }
    let frame = Frame::decode(header)?.on_rail(if layer == "tcp" { Rail::TCP } else { Rail::RDMA })?;
    match (layer, frame) {
        ("handshake", Frame::Handshake { kind, payload: expected }) => {
            let frame = Handshake::decode(kind, expected, payload)?;
            if let Handshake::Activate(f) = &frame {
                f.report().collect::<Result<Vec<_>, _>>()?;
            }
            let mut out = vec![0; bytes.len()];
            let length = frame.encode(&mut out).unwrap();
            Ok((describe_handshake(&frame), out[..length].to_vec()))
        }
        (
            "active" | "tcp",
            Frame::Command(_) | Frame::Reply(_) | Frame::Fetch(_) | Frame::Data(_) | Frame::Control(_),
        ) => {
            assert_eq!(frame.following() as usize, payload.len());
            if let Frame::Control(c) = &frame {
                c.payload.text(payload)?;
            }
            Ok((describe(&frame, payload), [&frame.encode()[..], payload].concat()))
        }
        // Which frames a connection takes is its driver's affair: here as SPEC.md has it.
        _ => Err(Fault::UnexpectedKind(header[0])),
    }
}

fn inspect_extents(bytes: &[u8], asked: u64) -> Result<(Value, Vec<u8>), Fault> {
    let extents = Extent::decode(bytes, asked).collect::<Result<Vec<_>, _>>()?;
    if extents.is_empty() {
        return Err(Fault::Malformed("no extents"));
    }
    Ok((Value::Null, bytes.to_vec()))
}

#[test]
fn the_files_are_what_the_generator_writes() {
    for (file, content) in files() {
        // As values: the order of keys depends on what else the workspace asks of serde_json.
        let [found, expected] = [read(file), content].map(|t| serde_json::from_str::<Value>(&t).unwrap());
        assert!(found == expected, "{file} is out of date: cargo run -p twinrail-protocol --example vectors");
    }
}

#[test]
fn every_frame_has_the_fields_and_bytes_of_its_vector() {
    for vector in vectors("frames.json") {
        let name = &vector["name"];
        let (fields, again) = inspect(&vector).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        assert_eq!(fields, vector["fields"], "{name}");
        assert_eq!(hex(&again) == vector["hex"], vector["reencodes"] != false, "{name}");
    }
}

#[test]
fn malformed_bytes_end_the_connection_with_the_status_of_their_vector() {
    for vector in vectors("malformed.json") {
        let name = &vector["name"];
        match inspect(&vector) {
            Ok((fields, _)) => panic!("{name} was taken for {fields}"),
            Err(fault) => assert_eq!(fault.status(), status(&vector), "{name}: {fault}"),
        }
    }
}

#[test]
fn requests_are_answered_with_the_status_of_their_vector() {
    for vector in vectors("requests.json") {
        let bytes = bytes(&vector);
        let Ok(Frame::Command(command)) = Frame::decode(bytes.first_chunk().unwrap()) else { panic!("{vector}") };
        let credits = Credits { granted_slots: 32, number: command.grant_seen, data_window: 1 << 20 };
        let read_only = vector["read_only"].as_bool().unwrap();
        let options = QueueOptions { depth: 32, in_capsule: 4096, credits, geometry: GEOMETRY, read_only };
        let mut queue = Queue::new(options, Instance(1), Epoch(1));
        let answer = match queue.receive(&command).unwrap() {
            Intake::Reply(reply) => reply.status,
            Intake::Receive => {
                match queue.payload_arrived(command.slot, command.sequence, crc32c(&bytes[HEADER_LEN..])) {
                    Step::Refuse(reply) => reply.status,
                    step => {
                        assert_eq!(step, Step::Ready);
                        Status::OK
                    }
                }
            }
            intake => {
                assert_eq!(intake, Intake::Ready);
                Status::OK
            }
        };
        assert_eq!(answer, status(&vector), "{}", vector["name"]);
        assert_eq!(
            matches!(queue.start(command.slot, command.sequence), Start::Go(_)),
            answer.is_ok(),
            "{}",
            vector["name"]
        );
    }
}

//! Rewrites the test vectors in `protocol/vectors`: `cargo run -p twinrail-protocol --example vectors`.

mod catalogue;

use std::path::Path;

fn main() -> std::io::Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
    for (name, content) in catalogue::files() {
        std::fs::write(directory.join(name), content)?;
        println!("{name}");
    }
    Ok(())
}

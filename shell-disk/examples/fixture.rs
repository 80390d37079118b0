//! Writes the folder that is kept for `tests/format.rs`; done once for each format:
//! `cargo run -p leasehold-disk --example fixture -- shell-disk/tests/fixture/format-2`.
#![allow(clippy::expect_used)]

#[path = "../tests/fixture/content.rs"]
mod content;

use std::sync::Arc;

use leasehold_core::store::Store as _;
use leasehold_disk::{DiskStore, Options};

fn main() {
    let folder = std::env::args().nth(1).expect("a folder that does not exist yet");
    let options = Options {
        clock: Some(Arc::new(|| content::CLOCK)),
        journal_bytes: 16 * 1024,
        inline: true,
        ..Options::default()
    };
    for (at, commits) in content::commits().iter().enumerate() {
        let mut store = DiskStore::open(&folder, options.clone()).expect("it opens");
        for commit in commits {
            store.commit(commit).expect("applied");
        }
        if at == 0 {
            store.close();
        }
    }
    // It is the lock of whoever opens a copy.
    std::fs::remove_file(std::path::Path::new(&folder).join("lock")).expect("removed");
}

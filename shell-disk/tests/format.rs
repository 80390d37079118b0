//! Stores written by earlier releases: a folder of each format is kept in the tree for ever, and a copy
//! of it is opened and read, record by record, index by index, entry by entry.

#[path = "fixture/content.rs"]
mod content;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use leasehold_core::Name;
use leasehold_core::store::model::Model;
use leasehold_core::store::{LogRead, Read, Slice, Store, UpTo};
use leasehold_disk::{DiskStore, Options};

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("made");
    for entry in std::fs::read_dir(from).expect("listed") {
        let path: PathBuf = entry.expect("listed").path();
        let target = to.join(path.file_name().expect("a name"));
        match path.is_dir() {
            true => copy(&path, &target),
            false => drop(std::fs::copy(&path, &target).expect("copied")),
        }
    }
}

/// Everything that was ever there, and what must not be.
fn everything() -> Read {
    let keys = ["job/a", "payload/a", "key/\u{e4}/%20", "gone/a", "claim/default/c1", "job/b", "job/c"];
    let slice =
        |index: &str| Slice { index: Name::from(index), after: None, up_to: UpTo::End, limit: 100, give: vec![] };
    Read {
        records: keys.map(Name::from).to_vec(),
        slices: ["st/queued", "leases", "none"].map(slice).to_vec(),
        log: Some(LogRead { log: Name::from("audit/default"), after: 0, limit: 100 }),
        max_bytes: usize::MAX,
        ..Read::default()
    }
}

#[test]
fn the_kept_folder_of_format_2_is_read_as_it_was_written() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixture/format-2");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("store");
    copy(&kept, &path);
    let mut model = Model::new(content::CLOCK);
    for commit in content::commits().iter().flatten() {
        model.commit(commit).expect("applied");
    }
    let expected = model.read(&everything()).expect("read");
    assert!(!expected.records[0].is_absent() && expected.records[3].is_absent() && expected.log.len() == 3);
    // Looked at, taken over, and opened again after that.
    for (read_only, inline) in [(true, false), (false, false), (false, true)] {
        let clock: Option<Arc<dyn Fn() -> u64 + Send + Sync>> = Some(Arc::new(|| content::CLOCK));
        let options = Options { clock, read_only, inline, ..Options::default() };
        let mut store = DiskStore::open(&path, options).expect("it opens");
        assert_eq!(store.read(&everything()).expect("read"), expected);
        assert!(store.faults().is_empty() && store.damaged().is_empty());
    }
}

//! What a folder must be like to be opened, and what is said otherwise.

use std::fs;
use std::process::Command;

use leasehold_disk::{DiskStore, OpenError, Options};

const CHILD: &str = "LEASEHOLD_TEST_OPEN";

fn open(path: &std::path::Path) -> Result<DiskStore, OpenError> {
    DiskStore::open(path, Options::default())
}

#[test]
fn a_folder_is_held_by_one_store_of_this_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("deep/new");
    let first = open(&path).expect("it opens");
    let error = open(&path).expect_err("it is held");
    assert!(matches!(error, OpenError::Held { .. }));
    let text = error.to_string();
    assert!(text.contains(&*path.to_string_lossy()) && text.contains("stop the other one"), "{text}");
    drop(first);
    open(&path).expect("it is free again");
}

/// Not a test by itself: what the other process does.
#[test]
fn child_opens() {
    if let Ok(path) = std::env::var(CHILD) {
        match open(path.as_ref()) {
            Ok(_) => println!("opened"),
            Err(error) => println!("refused: {error}"),
        }
    }
}

#[test]
fn a_folder_is_held_by_one_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let child = || {
        let test = std::env::current_exe().expect("this test");
        let out = Command::new(test)
            .args(["child_opens", "--exact", "--nocapture"])
            .env(CHILD, folder.path())
            .output()
            .expect("it runs");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let held = open(folder.path()).expect("it opens");
    let own = format!("is in use by process {}", std::process::id());
    assert!(child().contains(&own), "while it is held");
    drop(held);
    assert!(child().contains("opened"), "when it is free");
    open(folder.path()).expect("the other process has ended");
}

#[test]
fn a_folder_of_something_else_is_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("thesis.txt"), "do not touch").expect("written");
    let error = open(folder.path()).expect_err("it is not a store");
    assert!(matches!(error, OpenError::Foreign { .. }) && error.to_string().contains("thesis.txt"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).expect("listed").count(), 1, "nothing was put there");
}

#[test]
fn another_format_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    drop(open(folder.path()).expect("it opens"));
    let marker = folder.path().join("FORMAT");
    let own = fs::read_to_string(&marker).expect("read");
    assert_eq!(own, "leasehold-disk 2\n");
    let others = [
        ("leasehold-disk 1\n", "let that version run its jobs to their end, and give this one a new folder"),
        ("leasehold-disk 3\n", "a newer one"),
        ("leasehold-disk 20\n", "a newer one"),
        ("", "restore it"),
        ("\u{0}\u{1}", "restore it"),
        ("leasehold-disk\n", "restore it"),
    ];
    for (other, todo) in others {
        fs::write(&marker, other).expect("written");
        let error = open(folder.path()).expect_err("unknown");
        assert!(matches!(error, OpenError::Format { .. }), "{other:?}: {error}");
        let text = error.to_string();
        assert!(text.contains("leasehold-disk 2") && text.contains(todo), "{text}");
        assert_eq!(fs::read_to_string(&marker).expect("read"), other);
    }
    fs::write(&marker, own).expect("written");
    open(folder.path()).expect("it opens again");
}

#[test]
fn an_interrupted_first_opening_is_taken_up() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("lock"), "").expect("written");
    fs::write(folder.path().join("FORMAT.new"), "leaseh").expect("written");
    open(folder.path()).expect("it opens");
}

/// Every file with its bytes, but for the lock, which names its holder, and lists of tables: opening
/// removes those that have been replaced (the one in use is named by `current`, with its checksum).
fn files(folder: &std::path::Path) -> std::collections::BTreeMap<std::path::PathBuf, Vec<u8>> {
    let mut found = std::collections::BTreeMap::new();
    for entry in fs::read_dir(folder).expect("listed") {
        let path = entry.expect("listed").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if !path.ends_with("lock") && !path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('v')) {
            found.insert(path.clone(), fs::read(path).expect("read"));
        }
    }
    found
}

#[test]
fn looking_changes_nothing() {
    use leasehold_core::store::{Commit, Read, Store, StoreError};

    let folder = tempfile::tempdir().expect("a folder");
    let missing = folder.path().join("missing");
    let read_only = Options { read_only: true, ..Options::default() };
    let error = DiskStore::open(&missing, read_only.clone()).expect_err("there is none");
    assert!(matches!(error, OpenError::Missing { .. }) && !missing.exists(), "{error}");

    let path = folder.path().join("store");
    let mut store = open(&path).expect("it opens");
    let nothing = Commit { txns: Vec::new(), grows: false };
    store.commit(&nothing).expect("it works");
    store.close();
    drop(store);
    let before = files(&path);
    for options in [Options::default(), read_only.clone()] {
        let mut store = DiskStore::open(&path, options.clone()).expect("it opens");
        store.read(&Read::default()).expect("it reads");
        if options.read_only {
            assert_eq!(store.commit(&nothing), Err(StoreError::Unavailable));
            assert_eq!(store.poisoned(), None, "a refusal is no failure");
            store.close();
        }
        drop(store);
        let after = files(&path);
        let changed: Vec<_> = before.keys().chain(after.keys()).filter(|k| before.get(*k) != after.get(*k)).collect();
        assert!(changed.is_empty(), "{changed:?} after {options:?}");
    }
}

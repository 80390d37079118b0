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
    assert!(child().contains("refused: "), "while it is held");
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
    assert_eq!(own, "leasehold-disk 1\n");
    for other in ["leasehold-disk 2\n", "leasehold-disk 10\n", "", "\u{0}\u{1}", "leasehold-disk\n"] {
        fs::write(&marker, other).expect("written");
        let error = open(folder.path()).expect_err("unknown");
        assert!(matches!(error, OpenError::Format { .. }), "{other:?}: {error}");
        assert!(error.to_string().contains("leasehold-disk 1"), "{error}");
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

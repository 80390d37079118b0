//! Artefact folders. Goal: what `--out` wrote can be opened again and says whether it still ends so. Method: the
//! binary, on a run that is cut short, on a folder whose report was changed, and on folders that are none.

use std::path::PathBuf;
use std::process::Command;

use sim::explain;
use sim::plan::Plan;

fn sim(args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_sim")).args(args).output().expect("the binary runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&text).into_owned())
}

fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("sim-explain-{name}-{}", std::process::id()))
}

#[test]
fn a_folder_is_opened_again() {
    let folder = folder("whole");
    let dir = folder.to_str().expect("a path");
    let (status, text) = sim(&["--seed", "3", "--until", "600", "--out", dir]);
    assert_eq!(status, 0, "{text}");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect("written");
    assert!(read("before.txt").starts_with("after event 599,") && read("after.txt").starts_with("after event 600,"));

    let (status, text) = sim(&["explain", dir]);
    assert!(status == 0 && text.contains("== run again: the same digest"), "{status}: {text}");
    assert!(
        text.contains("stopped at event 600") && text.contains("== the world before and after event 600"),
        "{text}"
    );
    let (_, text) = sim(&["explain", dir, "--focus", "replica:0", "--until", "300"]);
    let (_, shown) = text.split_once("entries up to event 300").expect("a part of the trace");
    let (shown, _) = shown.split_once("\n== ").expect("what comes after it");
    assert!(shown.lines().skip(1).all(|l| l.contains("r0") || l.contains("FAULT") || l.contains("    ")), "{shown}");
    assert!(read("before-300.txt").starts_with("after event 299,"), "{text}");

    // As if another build had made it.
    let report = read("report.txt").replace("digest ", "digest 0").replace("build sim", "build other");
    std::fs::write(folder.join("report.txt"), report).expect("written");
    let (_, text) = sim(&["explain", dir]);
    assert!(text.contains("DIFFERS (another build made it)"), "{text}");
    std::fs::remove_dir_all(&folder).expect("it was ours");
}

#[test]
fn what_is_no_folder_of_ours_is_refused() {
    let folder = folder("none");
    let dir = folder.to_str().expect("a path");
    let (status, text) = sim(&["explain", dir]);
    assert!(status == 1 && text.contains("there is no such folder"), "{status}: {text}");
    std::fs::create_dir_all(&folder).expect("made");
    let (status, text) = sim(&["explain", dir]);
    assert!(status == 1 && text.contains("report.txt") && text.contains("--out"), "{status}: {text}");
    std::fs::write(folder.join("report.txt"), "nothing\n").expect("written");
    std::fs::write(folder.join("run.plan"), "seed 3\n").expect("written");
    let (status, text) = sim(&["explain", dir]);
    assert!(status == 1 && text.contains("is not a report of sim"), "{status}: {text}");
    std::fs::remove_dir_all(&folder).expect("it was ours");
    assert_eq!(sim(&["--seed", "3", "--focus", "job:nothing"]).0, 1);
}

/// Watching a run changes nothing of it, and the changes that it kept lead from nothing to the last state.
#[test]
fn watching_changes_nothing_that_happens() {
    let plan = Plan::of(5);
    let plain = sim::report::run(&plan);
    let watched = explain::watched(&plan, u64::MAX, plain.counts.events, true);
    assert_eq!(plain.digest, watched.digest);
    let watch = watched.watch.expect("it was watched");
    let mut stood = std::collections::BTreeMap::new();
    for change in &watch.changes {
        stood.insert(change.what.as_str(), change.now.as_deref());
    }
    let after = watch.after.as_deref().expect("there is a last event");
    let records: Vec<&str> =
        after.lines().filter(|line| line.starts_with("claim/") || line.starts_with("names ")).collect();
    for record in records {
        let key = record.split_whitespace().next().expect("a key");
        assert!(key == "names" || stood.get(key).is_some_and(Option::is_some), "{key}");
    }
}

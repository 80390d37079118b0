//! Random worlds. Goal: whatever a seed draws, the promises hold, and the seed replays its run bit for
//! bit. Method: the first few hundred seeds, and the binary run twice.

use std::process::Command;

use sim::plan::Plan;
use sim::report;

#[test]
fn the_first_seeds_hold() {
    let broken: Vec<String> = std::thread::scope(|scope| {
        let parts: Vec<_> = (0..2)
            .map(|part| {
                scope.spawn(move || {
                    let seeds = (0..300).filter(|seed| seed % 2 == part);
                    let outcomes = seeds.map(|seed| report::run(&Plan::of(seed)));
                    outcomes.filter_map(|o| kept(&o)).collect::<Vec<_>>()
                })
            })
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// What the first seeds came to when their behaviour was last changed on purpose, in an optimised build:
/// `cargo run --release -p sim -- --seeds 0..40 --digests > sim/regressions/digests.txt`. A refactoring leaves
/// them alone.
const DIGESTS: &str = include_str!("../regressions/digests.txt");

fn kept(o: &report::Outcome) -> Option<String> {
    let seed = format!("{} digest ", o.plan.seed);
    let golden = DIGESTS.lines().find_map(|line| line.strip_prefix(&seed));
    let digest = format!("{:016x}", o.digest);
    match golden {
        _ if !o.held() => Some(report::failure(o)),
        Some(golden) if golden != digest => Some(format!("seed {}: digest {digest}, and not {golden}", o.plan.seed)),
        _ => None,
    }
}

/// Plans under which a bug showed once, or shows while it is planted: they hold without it.
#[test]
fn what_was_found_once_stays_mended() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/regressions");
    let mut plans = 0;
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it can be read").path();
        if path.extension().is_none_or(|e| e != "plan") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("it can be read");
        let plan = Plan::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let outcome = report::run(&plan);
        assert!(outcome.held(), "{}: {}", path.display(), report::failure(&outcome));
        plans += 1;
    }
    assert!(plans > 0);
}

#[test]
fn a_run_is_stopped_where_it_is_told_to_and_leaves_its_trace() {
    let folder = std::env::temp_dir().join(format!("sim-out-{}", std::process::id()));
    let out = folder.to_str().expect("a path");
    let (status, text) = sim(&["run", "--seed", "3", "--until", "500", "--out", out]);
    assert_eq!(status, 0, "{text}");
    assert!(text.contains("stopped after 500 events"), "{text}");
    let trace = std::fs::read_to_string(folder.join("trace.txt")).expect("written");
    // Not every event has a line.
    let numbers = trace.split('#').skip(1).filter_map(|rest| rest.split(' ').next()?.parse::<u64>().ok());
    let last = numbers.max().unwrap_or_default();
    assert!((450..=500).contains(&last), "{last}: {}", trace.lines().last().unwrap_or_default());
    let page = std::fs::read_to_string(folder.join("timeline.html")).expect("written");
    assert!(page.contains("seed 3: stopped") && !page.contains("@ROWS@"));
    let plan = std::fs::read_to_string(folder.join("run.plan")).expect("written");
    assert_eq!(Plan::parse(&plan), Ok(Plan::of(3)));
    std::fs::remove_dir_all(&folder).expect("it was ours");
    // There is nothing to shrink where nothing breaks.
    assert_eq!(sim(&["shrink", "--seed", "3"]).0, 1);
}

fn sim(args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_sim")).args(args).output().expect("the binary runs");
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_second_process_gets_the_same_digests() {
    let (_, first) = sim(&["--seeds", "0..50", "--digests", "--keep-going"]);
    let (_, second) = sim(&["--seeds", "0..50", "--digests", "--keep-going", "--jobs", "1"]);
    assert_eq!(first.lines().count(), 50);
    assert_eq!(first, second);
}

#[test]
fn the_command_line_says_what_it_does() {
    let (status, text) = sim(&["--seed", "7"]);
    assert!(text.lines().any(|l| l.strip_prefix("digest ").is_some_and(|d| d.len() == 16)), "{text}");
    assert_eq!(status == 0, !text.contains("BROKEN"), "{text}");
    assert_eq!(sim(&["--help"]).0, 0);
    assert_eq!(sim(&["--seeds", "nonsense"]).0, 1);
    assert_eq!(sim(&[]).0, 1);
}

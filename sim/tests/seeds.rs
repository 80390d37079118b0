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
                    let outcomes = seeds.map(|seed| report::run(&Plan::of(seed), false));
                    outcomes.filter(|o| !o.held()).map(|o| report::failure(&o)).collect::<Vec<_>>()
                })
            })
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    assert!(broken.is_empty(), "{}", broken.join("\n"));
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

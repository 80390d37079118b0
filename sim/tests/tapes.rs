//! Recordings. Goal: what is recorded of a replica, which has none of the contents, makes a replica do the same again,
//! and anything else is pointed out at the step where it happens. Method: whole simulated worlds with all their
//! faults, every life of every replica recorded; recordings cut, damaged and changed.

use std::process::Command;

use leasehold_core::recording::{Player, Unreadable};
use sim::plan::Plan;
use sim::report::{self, Options};
use sim::tape::Tape;

/// In parts of so many steps.
fn tapes(seed: u64, every: u64) -> Vec<Tape> {
    report::run_with(&Plan::of(seed), &Options { tape: Some(every), ..Options::default() }).tapes
}

fn whole(seed: u64) -> impl Iterator<Item = (String, Vec<u8>)> {
    tapes(seed, u64::MAX).into_iter().map(|tape| (tape.name(), tape.parts.concat()))
}

#[test]
fn every_life_of_every_replica_is_replayed_output_by_output() {
    let (mut lives, mut steps) = (0, 0);
    for seed in 0..60 {
        for (name, tape) in whole(seed) {
            lives += 1;
            let mut player = Player::new(&tape).expect("it was just recorded");
            for played in player.by_ref() {
                steps += 1;
                assert_eq!(played.same, Ok(()), "seed {seed}, {name}: {played:?}");
            }
            assert_eq!(player.left(), 0, "seed {seed}, {name}");
        }
    }
    println!("{lives} lives, {steps} steps");
    assert!(lives > 200 && steps > 50_000, "{lives} lives, {steps} steps");
}

/// A part begins with the state that the replica has then, however much is under way.
#[test]
fn a_life_is_replayed_from_any_of_its_steps() {
    let (mut parts, mut steps) = (0, 0);
    for seed in 0..60 {
        for tape in tapes(seed, 13 + seed) {
            let mut next = 0;
            for part in &tape.parts {
                parts += 1;
                let mut player = Player::new(part).expect("it was just recorded");
                assert_eq!(player.header.first, next, "seed {seed}, {}", tape.name());
                for played in player.by_ref() {
                    steps += 1;
                    next = played.number + 1;
                    assert_eq!(played.same, Ok(()), "seed {seed}, {}: {played:?}", tape.name());
                }
                assert_eq!(player.left(), 0, "seed {seed}, {}", tape.name());
            }
        }
    }
    println!("{parts} parts, {steps} steps");
    assert!(parts > 1_000 && steps > 50_000, "{parts} parts, {steps} steps");
}

#[test]
fn taping_changes_nothing_that_happens() {
    for seed in [1, 5, 9] {
        let plain = report::run(&Plan::of(seed)).digest;
        let taped = report::run_with(&Plan::of(seed), &Options { tape: Some(100), ..Options::default() }).digest;
        assert_eq!(plain, taped, "seed {seed}");
    }
}

/// Contents that the simulator's clients send; none of them is found in a recording, nor texts of errors.
#[test]
fn no_contents_are_in_a_recording() {
    let found = |haystack: &[u8], needle: &[u8]| haystack.windows(needle.len()).any(|w| w == needle);
    // Each state that a replica ever had is in one of them.
    let all = |seed| {
        [
            whole(seed).map(|(_, tape)| tape).collect(),
            tapes(seed, 1).into_iter().map(|t| t.parts.concat()).collect::<Vec<_>>(),
        ]
        .concat()
    };
    for (n, tape) in (0..12).flat_map(all).enumerate() {
        for needle in [&b"{\"poison\""[..], b"r-0000", b"e-0000", b"\"done\":", b"xxxxxxxxxxxxxxxxr-"] {
            assert!(!found(&tape, needle), "{n} has {}", String::from_utf8_lossy(needle));
        }
    }
}

#[test]
fn a_torn_end_is_the_end_and_damage_is_told() {
    let (_, tape) = whole(3).next().expect("a life");
    let steps = Player::new(&tape).expect("whole").count();
    let torn = &tape[..tape.len() - 3];
    let mut player = Player::new(torn).expect("the beginning is there");
    assert_eq!(player.by_ref().count(), steps - 1);
    assert!(player.left() > 0);
    assert_eq!(Player::new(b"something else").err(), Some(Unreadable::NotARecording));
    assert_eq!(Player::new(&tape[..100]).err(), Some(Unreadable::Torn));
    let mut flipped = tape.clone();
    let at = flipped.len() / 2;
    flipped[at] ^= 4;
    let mut player = Player::new(&flipped).expect("the beginning is there");
    assert!(player.by_ref().all(|played| played.same.is_ok()) && player.left() > 0);
}

fn sim(args: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_sim")).args(args).output().expect("the binary runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&text).into_owned())
}

/// A recording of a replica with another seed: as if the core had been changed.
#[test]
fn the_first_step_that_differs_is_shown() {
    let folder = std::env::temp_dir().join(format!("sim-tapes-{}", std::process::id()));
    let out = folder.to_str().expect("a path");
    let (status, text) = sim(&["--seed", "3", "--out", out]);
    assert_eq!(status, 0, "{text}");
    let file = folder.join("replica-0.0.record");
    let name = file.to_str().expect("a path");
    let (status, text) = sim(&["replay", name]);
    assert!(status == 0 && text.contains("all as recorded"), "{status}: {text}");
    let (status, text) = sim(&["replay", name, "--only", "7"]);
    assert!(
        status == 0 && text.starts_with("#7 at ") && text.contains("state after it: Replica {"),
        "{status}: {text}"
    );
    let (_, text) = sim(&["replay", name, "--focus", "Submit", "--until", "2000"]);
    assert!(text.contains("request: Submit("), "{text}");

    let tape = std::fs::read(&file).expect("written");
    // The same steps for a replica of another world.
    let begun = |tape: &[u8]| tape.len() - Player::new(tape).expect("whole").left();
    let (_, other) = whole(4).next().expect("a life");
    let changed = [&other[..begun(&other)], &tape[begun(&tape)..]].concat();
    std::fs::write(&file, &changed).expect("written");
    let (status, text) = sim(&["replay", name, "--against", env!("CARGO_BIN_EXE_sim")]);
    assert!(
        status == 13 && text.contains("DIFFERS at step ") && text.contains("does this instead:"),
        "{status}: {text}"
    );

    std::fs::write(&file, b"no").expect("written");
    let (status, text) = sim(&["replay", name]);
    assert!(status == 1 && text.contains("is not a recording of a server"), "{status}: {text}");
    std::fs::remove_dir_all(&folder).expect("it was ours");
}

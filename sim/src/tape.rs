//! Recordings: of simulated replicas, so that what is recorded of a real one is known to be enough; and the replay
//! of one, step by step.

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;

use leasehold_core::recording::{Difference, Played, Player, Recorder, Unreadable};
use leasehold_core::{Input, Output, Replica};

/// One life of a simulated replica.
#[derive(Clone, Debug)]
pub struct Tape {
    pub replica: usize,
    pub epoch: u32,
    recorder: Recorder,
    /// After so many steps a part is over.
    every: u64,
    steps: u64,
    /// Each can be replayed alone.
    pub parts: Vec<Vec<u8>>,
}

impl Tape {
    pub fn new(replica: usize, epoch: u32, every: u64) -> Tape {
        Tape { replica, epoch, recorder: Recorder::default(), every, steps: 0, parts: Vec::new() }
    }

    /// The replica is about to take a step.
    pub fn begin(&mut self, replica: &Replica) {
        if self.steps.is_multiple_of(self.every) {
            self.parts.push(Recorder::begin(env!("CARGO_PKG_VERSION"), self.steps, replica));
        }
    }

    /// It took it.
    pub fn step(&mut self, now: u64, input: Input, outputs: &[Output]) {
        if let Some(part) = self.parts.last_mut() {
            self.recorder.step(now, input, outputs.to_vec(), part);
        }
        self.steps += 1;
    }

    pub fn name(&self) -> String {
        format!("replica-{}.{}.record", self.replica, self.epoch)
    }
}

/// What is shown of a recording.
#[derive(Clone, Debug, Default)]
pub struct Show {
    /// Every step that mentions it; an empty text: every step.
    pub focus: Option<String>,
    /// Only this step, with the replica's state after it.
    pub only: Option<u64>,
    /// Stop before this step.
    pub until: Option<u64>,
    /// What another build does at the first step that differs.
    pub against: Option<std::path::PathBuf>,
}

/// How a replay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Same,
    Differs,
    /// The one step that was asked for is in another file.
    NotThere,
}

/// Replays a recording and prints what is asked for.
pub fn replay(file: &Path, show: &Show, print: &mut dyn FnMut(&str)) -> Result<End, String> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let recording = std::fs::read(file).map_err(|e| named(&e))?;
    let mut player = Player::new(&recording).map_err(|why| match why {
        Unreadable::NotARecording => named(&"is not a recording of a server"),
        Unreadable::Torn => named(&"ends before its first step, or is damaged there"),
        Unreadable::OtherFormat(Some(release)) => {
            named(&format!("was made by another build, of release {release}: replay it with that"))
        }
        Unreadable::OtherFormat(None) => named(&"is of another encoding: replay it with the release that made it"),
    })?;
    let first = player.header.first;
    let (mut steps, mut outputs, mut last) = (0, 0, 0);
    let until = show.until.unwrap_or(u64::MAX).saturating_sub(first);
    while steps < until {
        let Ok(next) = catch_unwind(AssertUnwindSafe(|| player.next())) else {
            print(&format!("PANICS at step {}, as it may have when it was recorded", first.saturating_add(steps)));
            return Ok(End::Differs);
        };
        let Some(played) = next else { break };
        steps += 1;
        outputs += played.outputs.len() as u64;
        last = played.now;
        if show.only.is_some_and(|only| only == played.number) {
            print(&described(&played));
            print(&format!("state after it: {:#?}", player.replica));
            return Ok(if played.same.is_ok() { End::Same } else { End::Differs });
        }
        if let Err(difference) = played.same {
            print(&differs(&played, difference));
            if let Some(other) = &show.against {
                print(&elsewhere(other, file, played.number).unwrap_or_else(|why| why));
            }
            return Ok(End::Differs);
        }
        if let Some(focus) = &show.focus {
            let text = described(&played);
            if text.contains(focus) {
                print(&text);
            }
        }
    }
    let end = first.saturating_add(steps);
    if let Some(only) = show.only {
        print(&named(&format!("has the steps {first} to {end}, not step {only}")));
        return Ok(End::NotThere);
    }
    let torn = match player.left() {
        left if left > 0 && steps < until => format!(", and {left} bytes of a step that was cut off"),
        _ => String::new(),
    };
    print(&format!(
        "release {}: steps {first} to {} until {}.{:03} s, with {outputs} outputs, all as recorded{torn}",
        player.header.release,
        end,
        last / 1_000,
        last % 1_000
    ));
    Ok(End::Same)
}

fn described(played: &Played) -> String {
    let mut text =
        format!("#{} at {}.{:03} s: {:?}", played.number, played.now / 1_000, played.now % 1_000, played.input);
    for output in &played.outputs {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n    {output:?}");
    }
    text
}

fn differs(played: &Played, Difference { output, recorded }: Difference) -> String {
    let got = played.outputs.len();
    let mut text = format!("DIFFERS at step {}: {got} outputs, {recorded} were recorded", played.number);
    let _ = match (played.outputs.get(output), output < recorded) {
        (Some(_), true) => write!(text, ", and number {output} is not what was recorded"),
        (Some(_), false) => write!(text, ", and number {output} was not there"),
        (None, _) => write!(text, ", and number {output} is missing"),
    };
    format!("{text}\n{}", described(played))
}

/// What another build of this program makes of the same step.
fn elsewhere(program: &Path, file: &Path, step: u64) -> Result<String, String> {
    let run = Command::new(program).arg("replay").arg(file).arg("--only").arg(step.to_string()).output();
    let output = run.map_err(|e| format!("--against {}: {e}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let step: String = text
        .lines()
        .take_while(|l| !l.starts_with("state after it"))
        .fold(String::new(), |text, line| text + line + "\n");
    match step.is_empty() {
        true => Err(format!("--against {}: {}", program.display(), String::from_utf8_lossy(&output.stderr).trim())),
        false => Ok(format!("{} does this instead:\n{step}", program.display())),
    }
}

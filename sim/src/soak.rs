//! Long runs: seeds one after the other until the time is over, with a state on disk that another run goes on
//! from, and a report for people and one for programs.

use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::time::Duration;

use crate::report::{self, Broken, MARKS, Soak};
use crate::setup::SECOND;

/// The state that a run goes on from, in its folder.
pub const STATE: &str = "soak.state";
const REPORT: &str = "soak.md";
const FIGURES: &str = "soak.json";
/// The first line of a state.
const FORMAT: &str = "leasehold soak 1";

/// What has been run so far, in all runs on this folder.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// The first seed that has not been run.
    pub next: u64,
    pub took: Duration,
    pub soak: Soak,
    /// Who ran them: from which seed on, the commit of the tree, and the build.
    pub builds: Vec<(u64, String, String)>,
}

impl Record {
    /// What another run has left in the folder; nothing: a new one from that seed on.
    pub fn load(folder: &Path, from: u64) -> io::Result<Record> {
        match std::fs::read_to_string(folder.join(STATE)) {
            Ok(text) => Record::parse(&text).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Record { next: from, ..Record::default() }),
            Err(error) => Err(error),
        }
    }

    /// Writes the state and both reports. A run that is killed meanwhile leaves the state before it.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        for (name, text) in [(REPORT, self.markdown()), (FIGURES, self.json()), (STATE, self.state())] {
            let new = folder.join(format!("{name}.new"));
            std::fs::write(&new, text)?;
            std::fs::rename(new, folder.join(name))?;
        }
        Ok(())
    }

    /// From the next seed on it is this build that runs them.
    pub fn begin(&mut self) {
        let build = report::build();
        // Its name and version are those of the commit.
        let (commit, build) = (commit(), build.rsplit(' ').next().unwrap_or_default().to_owned());
        if self.builds.last().is_none_or(|last| (&last.1, &last.2) != (&commit, &build)) {
            self.builds.push((self.next, commit, build));
        }
    }

    fn totals(&self) -> [(&'static str, u64); 7] {
        let s = &self.soak;
        [
            ("seeds", s.seeds),
            ("events", s.events),
            ("sim_us", s.sim_us),
            ("jobs", s.jobs),
            ("groups", s.groups),
            ("slots", s.slots),
            ("checks", s.checks),
        ]
    }

    fn state(&self) -> String {
        let mut out = format!("{FORMAT}\nnext {}\nms {}\n", self.next, self.took.as_millis());
        for (name, n) in self.totals() {
            let _ = writeln!(out, "{name} {n}");
        }
        for (from, commit, build) in &self.builds {
            let _ = writeln!(out, "build {from} {commit} {build}");
        }
        for (mark, n) in &self.soak.marks {
            let _ = writeln!(out, "mark {mark:?} {n}");
        }
        for (fault, n) in &self.soak.faults {
            let _ = writeln!(out, "fault {fault} {n}");
        }
        for line in self.soak.tried.lines() {
            let _ = writeln!(out, "table {line}");
        }
        for b in &self.soak.broken {
            let _ = writeln!(out, "broken {} {} {} {}", b.seed, b.event, b.status, b.promise);
        }
        out
    }

    fn parse(text: &str) -> Result<Record, String> {
        let mut lines = text.lines();
        if lines.next() != Some(FORMAT) {
            return Err(format!("{STATE}: does not begin with {FORMAT:?}"));
        }
        let mut record = Record::default();
        for line in lines {
            record.take(line).ok_or_else(|| format!("{STATE}: {line:?} cannot be understood"))?;
        }
        Ok(record)
    }

    fn take(&mut self, line: &str) -> Option<()> {
        let words: Vec<&str> = line.split(' ').collect();
        let soak = &mut self.soak;
        match *words {
            ["mark", name, n] => {
                let mark = MARKS.into_iter().find(|m| format!("{m:?}") == name)?;
                soak.marks.insert(mark, n.parse().ok()?);
            }
            ["fault", name, n] => {
                soak.faults.insert(name.to_owned(), n.parse().ok()?);
            }
            ["build", from, commit, build] => {
                self.builds.push((from.parse().ok()?, commit.to_owned(), build.to_owned()));
            }
            ["table", name, cells] => soak.tried.take(name, cells)?,
            ["broken", seed, event, status, promise] => soak.broken.push(Broken {
                seed: seed.parse().ok()?,
                event: event.parse().ok()?,
                status: status.parse().ok()?,
                promise: promise.to_owned(),
            }),
            ["ms", n] => self.took = Duration::from_millis(n.parse().ok()?),
            [name, n] => {
                let n = n.parse().ok()?;
                let place = match name {
                    "next" => &mut self.next,
                    "seeds" => &mut soak.seeds,
                    "events" => &mut soak.events,
                    "sim_us" => &mut soak.sim_us,
                    "jobs" => &mut soak.jobs,
                    "groups" => &mut soak.groups,
                    "slots" => &mut soak.slots,
                    "checks" => &mut soak.checks,
                    _ => return None,
                };
                *place = n;
            }
            _ => return None,
        }
        Some(())
    }

    /// Events, and simulated seconds, for each second.
    fn speed(&self) -> (f64, f64) {
        let secs = self.took.as_secs_f64().max(1e-9);
        (self.soak.events as f64 / secs, self.soak.sim_us as f64 / SECOND as f64 / secs)
    }

    /// One line of progress.
    pub fn progress(&self) -> String {
        let (events, simulated) = self.speed();
        let days = self.soak.sim_us as f64 / SECOND as f64 / 86_400.0;
        format!(
            "seed {}: {} seeds, {} broken, {days:.1} days simulated, {events:.0} events/s, {simulated:.0} simulated s/s, marks left {:?}",
            self.next,
            self.soak.seeds,
            self.soak.broken.len(),
            self.soak.unreached()
        )
    }

    fn markdown(&self) -> String {
        let (events, simulated) = self.speed();
        let s = &self.soak;
        let mut out = String::from("# Soak\n\n| what | |\n| --- | --- |\n");
        let held = if s.broken.is_empty() { "held".to_owned() } else { format!("{} BROKEN", s.broken.len()) };
        let hours = s.sim_us as f64 / SECOND as f64 / 3_600.0;
        for (what, n) in [
            ("result", held),
            ("seeds", format!("{}, up to {}", s.seeds, self.next.saturating_sub(1))),
            ("took", format!("{:.1} min", self.took.as_secs_f64() / 60.0)),
            ("events", format!("{}, {events:.0} a second", s.events)),
            ("simulated", format!("{hours:.1} h, {simulated:.0} s a second")),
            ("jobs, groups, slots", format!("{}, {}, {}", s.jobs, s.groups, s.slots)),
            ("checks of the oracle", s.checks.to_string()),
        ] {
            let _ = writeln!(out, "| {what} | {n} |");
        }
        for (from, commit, build) in &self.builds {
            let _ = writeln!(out, "| from seed {from} | commit {commit}, build {build} |");
        }
        if !s.broken.is_empty() {
            out.push_str("\n## Broken\n\n| promise | seed | event |\n| --- | --- | --- |\n");
            for b in &s.broken {
                let _ = writeln!(out, "| `{}` | {} | {} |", b.promise, b.seed, b.event);
            }
        }
        out.push_str("\n## Faults that were met\n\n| fault | times |\n| --- | --- |\n");
        for (fault, n) in &s.faults {
            let _ = writeln!(out, "| `{fault}` | {n} |");
        }
        out.push_str("\n## Rare branches of the core\n\n| mark | times |\n| --- | --- |\n");
        for mark in MARKS {
            let n = s.marks.get(&mark).copied().unwrap_or_default();
            let _ = writeln!(out, "| {mark:?} | {} |", if n == 0 { "never".to_owned() } else { n.to_string() });
        }
        out.push_str("\n## What was tried\n\n`-`: cannot be, for a reason that the simulator names.\n\n");
        out.push_str(&s.tried.markdown());
        for cell in s.tried.empty() {
            let _ = writeln!(out, "- never: {cell}");
        }
        out
    }

    fn json(&self) -> String {
        let (events, simulated) = self.speed();
        let s = &self.soak;
        // Names are words of this program: none needs escaping.
        let object = |pairs: Vec<(String, u64)>| {
            let pairs: Vec<String> = pairs.into_iter().map(|(name, n)| format!("\"{name}\":{n}")).collect();
            format!("{{{}}}", pairs.join(","))
        };
        let totals = self.totals().map(|(name, n)| (name.to_owned(), n));
        let marks = MARKS.map(|m| (format!("{m:?}"), s.marks.get(&m).copied().unwrap_or_default()));
        let faults = s.faults.iter().map(|(name, n)| (name.clone(), *n)).collect();
        let broken: Vec<String> = s
            .broken
            .iter()
            .map(|b| format!("{{\"promise\":\"{}\",\"seed\":{},\"event\":{}}}", b.promise, b.seed, b.event))
            .collect();
        format!(
            "{{\"commit\":\"{}\",\"next\":{},\"seconds\":{:.1},\"events_per_s\":{events:.0},\"simulated_s_per_s\":{simulated:.0},\"totals\":{},\"faults\":{},\"marks\":{},\"broken\":[{}]}}\n",
            self.builds.last().map_or("unknown", |last| &last.1),
            self.next,
            self.took.as_secs_f64(),
            object(totals.into()),
            object(faults),
            object(marks.into()),
            broken.join(",")
        )
    }
}

/// The commit of the tree that this was built from, as that stands now; `+` if something in it is not committed.
fn commit() -> String {
    let git = |args: &[&str]| {
        let output = std::process::Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR")]).args(args).output();
        output.ok().filter(|o| o.status.success()).map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
    };
    let Some(head) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".into() };
    let clean = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changed| changed.is_empty());
    if clean { head } else { head + "+" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_as_it_was_written() {
        let mut record = Record { next: 7, took: Duration::from_millis(1_234), ..Record::default() };
        record.soak.seeds = 5;
        record.soak.events = 70_000;
        record.builds.push((0, "abc".into(), "123".into()));
        record.soak.marks.insert(MARKS[3], 4);
        record.soak.faults.insert("evict".into(), 2);
        record.soak.broken.push(Broken { seed: 3, event: 9, status: 10, promise: "limit-held".into() });
        let text = record.state();
        let again = Record::parse(&text).unwrap_or_default();
        assert_eq!(again.state(), text);
        assert_eq!((again.markdown(), again.json()), (record.markdown(), record.json()));
        assert!(record.markdown().contains("| `limit-held` | 3 | 9 |"));
        for bad in ["", "leasehold soak 2", "leasehold soak 1\nnext", "leasehold soak 1\nmark None 1"] {
            assert!(Record::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn every_mark_of_the_core_is_among_those_that_are_told() {
        let mut marks = MARKS.to_vec();
        marks.sort_unstable();
        marks.dedup();
        assert_eq!(marks.len(), MARKS.len());
        // The last that there is; those before it have lower numbers.
        assert_eq!(marks.last().map(|m| *m as usize + 1), Some(MARKS.len()), "one is missing");
    }
}

//! A folder that `--out` wrote, opened again: what broke, whether it still does, what led to it, and how the
//! world stood just before and just after.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::focus::Focus;
use crate::picture;
use crate::plan::Plan;
use crate::report::{self, Options, Outcome};
use crate::state::Watch;
use crate::trace::{self, Entry, Trace};

/// Lines of a part of the trace that are printed.
const LINES: usize = 400;

/// Lines about the world before and after that are shown.
const DIFFERENCES: usize = 40;

/// What is shown besides the report.
#[derive(Clone, Debug, Default)]
pub struct Show {
    /// The lines of the trace that concern this.
    pub focus: Option<Focus>,
    /// The world as it was around this event, instead of the last one.
    pub until: Option<u64>,
}

/// What the report of a folder says of the run that it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    digest: String,
    /// "held", "stopped", or what broke at which event.
    verdict: String,
    events: u64,
    build: Option<String>,
}

/// Runs a plan again with everything written down: the trace, what each event changed, and the world around
/// `event` as a whole.
pub fn watched(plan: &Plan, until: u64, event: u64, changes: bool) -> Outcome {
    let mut watch = Watch::at(event);
    watch.changes_kept = changes;
    let trace = Trace { keep: true, ..Trace::default() };
    let watch = Some(Box::new(watch));
    report::run_with(plan, &Options { trace, until, watch, ..Options::default() })
}

/// Opens a folder, prints what is asked for, and gives the exit status of the run.
///
/// # Errors
/// If the folder is not one that `--out` wrote.
pub fn explain(folder: &Path, show: &Show, print: &mut dyn FnMut(&str)) -> Result<u8, String> {
    let (told, text, plan) = read(folder)?;
    print(text.trim_end());
    // A run that was cut short is cut short again.
    let until = if told.verdict.starts_with("stopped") { told.events } else { u64::MAX };
    let event = show.until.unwrap_or(told.events);
    let until = show.until.map_or(until, |at| until.min(at));
    let again = watched(&plan, until, event, false);
    print(&format!("\n== run again: {}", compared(&told, &again, show.until)));
    let entries: Vec<&Entry> = again.trace.iter().filter(|e| e.event <= event).collect();
    if let Some(focus) = &show.focus {
        let mut focus = focus.clone();
        let some: Vec<&&Entry> = entries.iter().filter(|e| focus.takes(e)).collect();
        print(&format!("\n== {} of {} entries up to event {event}", some.len(), entries.len()));
        let skip = some.len().saturating_sub(LINES);
        if skip > 0 {
            print(&format!("the first {skip} are left out"));
        }
        some.iter().skip(skip).for_each(|entry| print(&trace::line(entry)));
    } else if show.until.is_some() || again.broken.is_none() {
        print(&format!("\n== what came before event {event}"));
        let last: Vec<Entry> = entries.iter().rev().take(report::SLICE).rev().map(|e| (*e).clone()).collect();
        print(picture::picture(&last, &BTreeSet::new(), report::SLICE).trim_end());
    } else {
        print("\n== what led to it");
        print(report::led_to(&again).trim_end());
    }
    let [before, after] = worlds(&again, folder, show.until.map(|_| event)).map_err(|e| e.to_string())?;
    print(&format!("\n== the world before and after event {event}: {} and {}", before.display(), after.display()));
    print(&differences(&again));
    Ok(again.status())
}

/// Writes the world before and after into a folder, and says where.
///
/// # Errors
/// If a file cannot be written.
pub fn worlds(o: &Outcome, folder: &Path, event: Option<u64>) -> std::io::Result<[PathBuf; 2]> {
    let tail = event.map_or_else(String::new, |event| format!("-{event}"));
    let files = ["before", "after"].map(|name| folder.join(format!("{name}{tail}.txt")));
    let watch = o.watch.as_deref();
    let texts = [watch.and_then(|w| w.before.as_deref()), watch.and_then(|w| w.after.as_deref())];
    for (file, text) in files.iter().zip(texts) {
        std::fs::write(file, text.unwrap_or("the run has no such event\n"))?;
    }
    Ok(files)
}

/// What of the world is another after the event: of a line that changed the parts that did.
fn differences(o: &Outcome) -> String {
    let Some((before, after)) = o.watch.as_deref().and_then(|w| Some((w.before.as_deref()?, w.after.as_deref()?)))
    else {
        return "the run has no such event".to_owned();
    };
    let (old, new) = (lines(before), lines(after));
    let mut out = Vec::new();
    for (name, was) in &old {
        match new.get(name) {
            Some(is) if is == was => {}
            Some(is) => out.extend([format!("- {name} {}", parts(was, is)), format!("+ {name} {}", parts(is, was))]),
            None => out.push(format!("- {name} {was}")),
        }
    }
    out.extend(new.iter().filter(|(name, _)| !old.contains_key(*name)).map(|(name, is)| format!("+ {name} {is}")));
    let more = out.len().saturating_sub(DIFFERENCES);
    let mut out: Vec<String> = out.iter().take(DIFFERENCES).map(|line| trace::short(line, 400)).collect();
    if more > 0 {
        out.push(format!("and {more} more lines"));
    }
    out.join("\n")
}

/// Lines of the world by what they are about, without headings.
fn lines(text: &str) -> BTreeMap<String, &str> {
    let mut all = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with("==")) {
        let words = if line.starts_with("call ") { 2 } else { 1 };
        let end = line.match_indices(' ').nth(words - 1).map_or(line.len(), |(at, _)| at);
        let (name, rest) = line.split_at(end);
        // What is on its way is told by its time; several may have the same.
        let name = if line.starts_with(' ') { line.to_owned() } else { name.to_owned() };
        all.insert(name, if line.starts_with(' ') { "" } else { rest.trim() });
    }
    all
}

/// The parts of a text that another does not have.
fn parts(text: &str, than: &str) -> String {
    let known: BTreeSet<&str> = than.split(", ").collect();
    text.split(", ").filter(|part| !known.contains(part)).collect::<Vec<_>>().join(", ")
}

fn compared(told: &Told, again: &Outcome, until: Option<u64>) -> String {
    let digest = format!("{:016x}", again.digest);
    let verdict = again.brief();
    if until.is_some_and(|at| at < told.events) {
        return format!("{verdict}, as was asked for");
    }
    if digest == told.digest && verdict == told.verdict {
        return format!("the same digest {digest}, and the same end: {verdict}");
    }
    let build = match &told.build {
        Some(build) if *build == report::build() => "the same build made it: it is NOT DETERMINISTIC",
        Some(_) => "another build made it",
        None => "it does not say which build made it",
    };
    format!("DIFFERS ({build})\n  then  digest {}, {}\n  now   digest {digest}, {verdict}", told.digest, told.verdict)
}

fn read(folder: &Path) -> Result<(Told, String, Plan), String> {
    if !folder.is_dir() {
        return Err(format!("{}: there is no such folder", folder.display()));
    }
    let file = |name: &str| {
        let path = folder.join(name);
        std::fs::read_to_string(&path)
            .map_err(|e| format!("{}: {e}; a folder that --out wrote has report.txt and run.plan", path.display()))
    };
    let (text, plan) = (file("report.txt")?, file("run.plan")?);
    let plan = Plan::parse(&plan).map_err(|e| format!("{}: {e}", folder.join("run.plan").display()))?;
    let told = told(&text).ok_or_else(|| {
        format!("{}: is not a report of sim: it has no line with a digest", folder.join("report.txt").display())
    })?;
    Ok((told, text, plan))
}

fn told(report: &str) -> Option<Told> {
    let field = |name: &str| {
        let line = report.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map(|rest| rest.trim().to_owned())
    };
    let verdict = field("verdict")?;
    let events = verdict.rsplit(' ').next()?.parse().ok()?;
    Some(Told { digest: field("digest")?, verdict, events, build: field("build") })
}

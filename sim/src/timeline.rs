//! A run as one HTML file: a lane for everybody, an arrow for each message, faults shaded, and how the world
//! stood when an entry is clicked. It needs nothing from elsewhere and works from a disk.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::report::{self, Outcome};
use crate::state::{Change, Trouble};
use crate::trace::{self, Entry, Kind, Lane};

/// Entries in one file, at most: the last ones are kept.
const MOST: usize = 40_000;
/// Characters of one entry.
const TEXT: usize = 1_500;

pub fn html(outcome: &Outcome) -> String {
    let from = outcome.trace.len().saturating_sub(MOST);
    let entries = outcome.trace.get(from..).unwrap_or_default();
    let lanes: Vec<Lane> = entries
        .iter()
        .flat_map(|e| [e.from, e.to])
        .filter(|lane| *lane != Lane::World)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    let place = |lane: Lane| lanes.iter().position(|l| *l == lane).map_or(-1, |n| n as i32);
    let names: Vec<String> = lanes.iter().map(|lane| quoted(&lane.to_string())).collect();
    let mut rows = String::new();
    for entry in entries {
        // Writing to a string cannot fail.
        let _ = writeln!(
            rows,
            "[{},{},{},{},{},{}],",
            entry.at,
            entry.event,
            place(entry.from),
            place(entry.to),
            kind(entry),
            quoted(&trace::short(&entry.text, TEXT))
        );
    }
    if let Some(violation) = outcome.broken.as_ref().filter(|_| !outcome.held()) {
        let text = format!("{}: {}", violation.promise.text(), trace::short(&violation.what, TEXT));
        let _ = writeln!(rows, "[{},{},-1,-1,5,{}],", outcome.sim_us, outcome.counts.events, quoted(&text));
    }
    let watch = outcome.watch.as_deref();
    let first = entries.first().map_or(0, |e| e.event);
    let changes = changes(watch.map(|w| w.changes.as_slice()).unwrap_or_default(), first);
    let troubles = troubles(watch.map(|w| w.troubles.as_slice()).unwrap_or_default(), &place);
    let title = format!("seed {}: {}", outcome.plan.seed, outcome.promise());
    let verdict = report::verdict(outcome);
    let verdict = if verdict.is_empty() {
        report::summary(outcome, None)
    } else {
        format!("{verdict}digest {:016x}\n", outcome.digest)
    };
    let head = format!("{verdict}\n{}", outcome.plan);
    let about: Vec<String> = outcome
        .broken
        .iter()
        .flat_map(|violation| crate::picture::subjects(&violation.what))
        .map(|subject| quoted(&subject))
        .collect();
    let left = if from > 0 { format!("the last {MOST} of {} entries", outcome.trace.len()) } else { String::new() };
    PAGE.replace("@TITLE@", &escaped(&title))
        .replace("@HEAD@", &escaped(&head))
        .replace("@LEFT@", &left)
        .replace("@LANES@", &names.join(","))
        .replace("@ABOUT@", &about.join(","))
        .replace("@TROUBLES@", &troubles)
        .replace("@CHANGES@", &changes)
        .replace("@ROWS@", &rows)
}

/// What each event changed, from the first that is shown on; what came before stands at its beginning.
fn changes(all: &[Change], first: u64) -> String {
    let mut out = String::new();
    let cut = all.partition_point(|change| change.event < first);
    let mut before = std::collections::BTreeMap::new();
    for change in &all[..cut] {
        before.insert(change.what.as_str(), change.now.as_deref());
    }
    let before = before.into_iter().filter(|(_, now)| now.is_some()).map(|(what, now)| (0, what, now));
    let after = all[cut..].iter().map(|change| (change.event, change.what.as_str(), change.now.as_deref()));
    for (event, what, now) in before.chain(after) {
        let now = now.map_or_else(|| "null".to_owned(), |now| quoted(&trace::short(now, TEXT)));
        // Writing to a string cannot fail.
        let _ = writeln!(out, "[{event},{},{now}],", quoted(what));
    }
    out
}

fn troubles(all: &[Trouble], place: &impl Fn(Lane) -> i32) -> String {
    let shown = all.iter().filter(|t| place(t.lane) >= 0);
    let text = |t: &Trouble| {
        let to = t.to.map_or_else(|| "Infinity".to_owned(), |to| to.to_string());
        format!("[{},{},{to},{}],", place(t.lane), t.from, quoted(t.what))
    };
    shown.map(text).collect()
}

fn kind(entry: &Entry) -> u8 {
    match entry.kind {
        Kind::Message => 0,
        Kind::Effect => 1,
        Kind::Mark => 2,
        Kind::Fault => 3,
        Kind::Loss => 4,
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A string of JavaScript that cannot end the script that it stands in.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..='\u{1f}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

const PAGE: &str = include_str!("timeline.html");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text() {
        assert_eq!(quoted("a\"</script>\n\\"), r#""a\"\u003c/script\u003e\u000a\\""#);
        assert_eq!(escaped("<b a=\"1\">&"), "&lt;b a=&quot;1&quot;&gt;&amp;");
    }
}

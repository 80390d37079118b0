//! A run as one HTML file: a lane for everybody, an arrow for each message, faults shaded, and what an entry
//! says when it is clicked. It needs nothing from elsewhere and works from a disk.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::report::{self, Outcome};
use crate::trace::{Entry, Kind, Lane};

/// Entries in one file, at most: the last ones are kept.
const MOST: usize = 20_000;

pub fn html(outcome: &Outcome) -> String {
    let from = outcome.trace.len().saturating_sub(MOST);
    let entries = outcome.trace.get(from..).unwrap_or_default();
    let lanes: Vec<Lane> =
        entries.iter().flat_map(|e| [e.from, e.to]).chain([Lane::World]).collect::<BTreeSet<_>>().into_iter().collect();
    let place = |lane: Lane| lanes.iter().position(|l| *l == lane).unwrap_or_default();
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
            quoted(&entry.text)
        );
    }
    let title = format!("seed {}: {}", outcome.plan.seed, outcome.promise());
    let head = format!("{}\n{}", report::verdict(outcome), outcome.plan);
    let about: Vec<String> = outcome
        .broken
        .iter()
        .flat_map(|violation| crate::picture::subjects(&violation.what))
        .map(|subject| quoted(&subject))
        .collect();
    PAGE.replace("@TITLE@", &escaped(&title))
        .replace("@HEAD@", &escaped(&head))
        .replace("@LANES@", &names.join(","))
        .replace("@ABOUT@", &about.join(","))
        .replace("@ROWS@", &rows)
}

fn kind(entry: &Entry) -> u8 {
    match entry.kind {
        Kind::Message => 0,
        Kind::Effect => 1,
        Kind::Mark => 2,
        Kind::Fault => 3,
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

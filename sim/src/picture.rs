//! What led to a broken promise, as a sequence diagram on one screen: the messages that concern the job,
//! group or call that the violation names, with a column for everybody who sent or heard one.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use leasehold_core::JobId;
use leasehold_core::ids::GroupId;

use crate::setup::SECOND;
use crate::trace::{Entry, Kind, Lane, short};

/// What a violation is about: ids in its text, and calls.
pub fn subjects(what: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let words: Vec<&str> = what.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).collect();
    for (n, word) in words.iter().enumerate() {
        if word.parse::<JobId>().is_ok() || word.parse::<GroupId>().is_ok() {
            found.insert((*word).to_owned());
        }
        if *word == "call"
            && let Some(number) = words.get(n + 1).filter(|w| w.parse::<u32>().is_ok())
        {
            found.insert(format!("call {number}"));
        }
    }
    found
}

fn mentions(text: &str, subject: &str) -> bool {
    // "call 1" is not meant by "call 12".
    text.match_indices(subject).any(|(at, _)| {
        let after = text[at + subject.len()..].chars().next();
        !after.is_some_and(|c| c.is_ascii_alphanumeric() || c == '-')
    })
}

/// The entries that concern the subjects: those that name them, the calls that do, and the store's
/// operations which carried them. Faults in between are kept. Without a subject: the end of the trace.
pub fn slice<'a>(trace: &'a [Entry], subjects: &BTreeSet<String>, most: usize) -> Vec<&'a Entry> {
    let mut subjects = subjects.clone();
    for entry in trace {
        if subjects.iter().any(|s| mentions(&entry.text, s))
            && let Some(rest) = entry.text.strip_prefix("call ")
            && let Some(number) = rest.split([':', ' ']).next()
        {
            subjects.insert(format!("call {number}"));
        }
    }
    let named: Vec<usize> = (0..trace.len())
        .filter(|n| {
            let Some(entry) = trace.get(*n) else { return false };
            entry.kind == Kind::Fault || subjects.iter().any(|s| mentions(&entry.text, s))
        })
        .collect();
    let mut keep: BTreeSet<usize> = BTreeSet::new();
    for n in named {
        keep.insert(n);
        // An effect is shown with the message that had it, and with its answer.
        let Some(entry) = trace.get(n).filter(|e| e.kind == Kind::Effect && e.to == Lane::Store) else { continue };
        let Some(message) = (0..n).rev().find(|m| trace.get(*m).is_some_and(|e| e.kind == Kind::Message)) else {
            continue;
        };
        keep.insert(message);
        let op = trace.get(message).and_then(|e| e.text.split(':').next()).unwrap_or_default();
        let answers = |e: &Entry| e.from == Lane::Store && e.to == entry.from && e.text.split(':').next() == Some(op);
        if let Some(answer) = (n..trace.len()).find(|m| trace.get(*m).is_some_and(answers)) {
            keep.insert(answer);
        }
    }
    if keep.iter().all(|n| trace.get(*n).is_some_and(|e| e.kind == Kind::Fault)) {
        keep.extend(trace.len().saturating_sub(most)..trace.len());
    }
    let from = keep.len().saturating_sub(most);
    keep.into_iter().skip(from).filter_map(|n| trace.get(n)).collect()
}

const WIDTH: usize = 9;

/// The entries as a diagram, one line each.
pub fn diagram(entries: &[&Entry]) -> String {
    let lanes: Vec<Lane> = entries
        .iter()
        .flat_map(|e| [e.from, e.to])
        .filter(|lane| *lane != Lane::World)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    let place = |lane: Lane| lanes.iter().position(|l| *l == lane);
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write!(out, "{:>13} {:>7} ", "time", "event");
    let names: String = lanes.iter().map(|lane| format!("{:<WIDTH$}", lane.to_string())).collect();
    let _ = writeln!(out, "{names}");
    for entry in entries {
        let mut row: Vec<char> = vec![' '; lanes.len() * WIDTH];
        for n in 0..lanes.len() {
            row[n * WIDTH] = '|';
        }
        let mut text = entry.text.clone();
        match (entry.kind, place(entry.from), place(entry.to)) {
            (Kind::Fault, ..) => {
                row.fill('~');
                text = format!("FAULT {text}");
            }
            (Kind::Message, Some(from), Some(to)) if from != to => {
                let (low, high) = (from.min(to) * WIDTH, from.max(to) * WIDTH);
                row[low + 1..high].fill('-');
                row[from * WIDTH] = 'o';
                row[to * WIDTH] = if to > from { '>' } else { '<' };
            }
            (_, _, Some(to)) => row[to * WIDTH] = if entry.kind == Kind::Mark { '!' } else { '*' },
            _ => {}
        }
        let row: String = row.into_iter().collect();
        let (s, us) = (entry.at / SECOND, entry.at % SECOND);
        let _ = writeln!(out, "{s:>6}.{us:06} {:>7} {row}{}", format!("#{}", entry.event), short(&text, 110));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::Caller;

    fn entry(event: u64, from: Lane, to: Lane, kind: Kind, text: &str) -> Entry {
        Entry { at: event * 1_000, event, from, to, kind, text: text.to_owned() }
    }

    #[test]
    fn a_slice_follows_the_call_and_its_operation() {
        let (client, r, store) = (Lane::Caller(Caller::Client(0)), Lane::Replica(0), Lane::Store);
        let trace = [
            entry(1, client, r, Kind::Message, "call 1: claim"),
            entry(2, client, r, Kind::Message, "call 12: claim"),
            entry(3, r, store, Kind::Message, "op 7: commit of 1"),
            entry(3, r, store, Kind::Effect, "put job/x => applied"),
            entry(4, store, r, Kind::Message, "op 7: commit @5"),
            entry(5, r, r, Kind::Effect, "answers call 1: x"),
            entry(6, r, client, Kind::Message, "call 1 hears: it"),
            entry(7, r, client, Kind::Message, "call 12 hears: nothing"),
        ];
        let about = BTreeSet::from(["x".to_owned(), "call 1".to_owned()]);
        let events: Vec<u64> = slice(&trace, &about, 30).iter().map(|e| e.event).collect();
        assert_eq!(events, [1, 3, 3, 4, 5, 6]);
        let picture = diagram(&slice(&trace, &about, 30));
        assert!(picture.contains("o-------->") && picture.contains("<--------o"), "{picture}");
    }

    #[test]
    fn what_a_violation_names_is_found() {
        assert_eq!(subjects("call 17 was not answered"), BTreeSet::from(["call 17".to_owned()]));
        assert!(subjects("nothing is named here").is_empty());
    }
}

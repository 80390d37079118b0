//! What led to a broken promise, as a sequence diagram on one screen: the messages that concern the job,
//! group or call that the violation names, with a column for everybody who sent or heard one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use leasehold_core::JobId;
use leasehold_core::ids::GroupId;
use leasehold_core::store::SCORE_MAX;

use crate::focus::{call_of, mentions};
use crate::setup::SECOND;
use crate::store::EPOCH;
use crate::trace::{Entry, Kind, Lane, short};

/// Columns of a screen.
const SCREEN: usize = 160;
/// Columns of a lane.
const WIDTH: usize = 9;
/// Columns of time and event.
const GUTTER: usize = 22;
/// Of a slice that is too long, so many entries of its beginning are shown.
const FIRST: usize = 8;

/// What a violation is about: ids in its text, calls, slots and pools by their keys.
pub fn subjects(what: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let words: Vec<&str> = what.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).collect();
    for (n, word) in words.iter().enumerate() {
        if is_id(word) {
            found.insert((*word).to_owned());
        }
        if *word == "call"
            && let Some(number) = words.get(n + 1).filter(|w| w.parse::<u32>().is_ok())
        {
            found.insert(format!("call {number}"));
        }
    }
    // A key as it stands in the store: `holders/p0`, `slot/p0/default/s1`.
    for word in what.split(|c: char| c.is_whitespace() || matches!(c, ',' | ';' | '(' | ')' | '[' | ']' | '"')) {
        let word = word.trim_end_matches([':', '.']);
        if word.split_once('/').is_some_and(|(kind, rest)| KINDS.contains(&kind) && !rest.is_empty()) {
            found.insert(word.to_owned());
        }
    }
    for (n, word) in words.iter().enumerate() {
        if let (true, Some(name)) = (*word == "pool", words.get(n + 1))
            && !name.is_empty()
        {
            found.insert(format!("holders/{name}"));
        }
    }
    found
}

const KINDS: [&str; 10] = ["holders", "batch", "waiting", "alive", "slot", "pool", "probe", "hold", "queue", "key"];

fn is_id(word: &str) -> bool {
    word.parse::<JobId>().is_ok() || word.parse::<GroupId>().is_ok()
}

/// The entries that concern the subjects: those that name them, the calls that do, and the store's
/// operations which carried them, with what became of these on their way. Large faults are kept. Without a
/// subject: the end of the trace.
pub fn slice<'a>(trace: &'a [Entry], subjects: &BTreeSet<String>, most: usize) -> Vec<&'a Entry> {
    let mut subjects = subjects.clone();
    subjects.extend(holders(trace, &subjects));
    for entry in trace {
        if subjects.iter().any(|s| mentions(&entry.text, s))
            && let Some(call) = call_of(&entry.text)
        {
            subjects.insert(format!("call {call}"));
        }
    }
    let about = |entry: &Entry| subjects.iter().any(|s| mentions(&entry.text, s));
    // Reads are many: of each replica the last is shown, from which it decided.
    let mut last_read = BTreeMap::new();
    for (n, entry) in trace.iter().enumerate() {
        if is_read(entry) && about(entry) {
            last_read.insert(entry.from, n);
        }
    }
    let shown = |n: usize, entry: &Entry| match is_read(entry) {
        true => last_read.get(&entry.from) == Some(&n),
        false => entry.kind == Kind::Fault || about(entry),
    };
    let named: Vec<usize> = trace.iter().enumerate().filter(|(n, entry)| shown(*n, entry)).map(|(n, _)| n).collect();
    let mut keep: BTreeSet<usize> = BTreeSet::new();
    for n in named {
        keep.insert(n);
        // An effect is shown with the message that had it, with its answer, and with what was lost of either.
        let Some(entry) = trace.get(n).filter(|e| e.kind == Kind::Effect && e.to == Lane::Store) else { continue };
        let Some(message) = (0..n).rev().find(|m| trace.get(*m).is_some_and(|e| e.kind == Kind::Message)) else {
            continue;
        };
        keep.insert(message);
        let op = trace.get(message).and_then(|e| e.text.split(':').next()).unwrap_or_default();
        let same =
            |e: &Entry, from: Lane, to: Lane| e.from == from && e.to == to && e.text.split(':').next() == Some(op);
        let answers = |e: &Entry| e.kind == Kind::Message && same(e, Lane::Store, entry.from);
        keep.extend((n..trace.len()).find(|m| trace.get(*m).is_some_and(answers)));
        let lost =
            |e: &Entry| e.kind == Kind::Loss && (same(e, Lane::Store, entry.from) || same(e, entry.from, Lane::Store));
        keep.extend(
            (message.saturating_sub(LOOK)..trace.len().min(n + LOOK)).filter(|m| trace.get(*m).is_some_and(lost)),
        );
    }
    if keep.iter().all(|n| trace.get(*n).is_some_and(|e| e.kind == Kind::Fault)) {
        keep.extend(trace.len().saturating_sub(most)..trace.len());
    }
    keep.into_iter().filter_map(|n| trace.get(n)).collect()
}

/// The slots of a pool that was named: those that were granted last.
fn holders(trace: &[Entry], subjects: &BTreeSet<String>) -> BTreeSet<String> {
    let pools: Vec<String> =
        subjects.iter().filter(|s| s.starts_with("holders/")).map(|pool| format!("{pool}+")).collect();
    let granted = |entry: &&Entry| {
        entry.text.starts_with("APPLIED") && pools.iter().any(|pool| entry.text.contains(pool.as_str()))
    };
    let slot = |entry: &Entry| {
        let (_, rest) = entry.text.split_once(" put slot/")?;
        rest.split_once('=').map(|(key, _)| format!("slot/{key}"))
    };
    // A slot that was asked for without a name has a drawn one, by which its answer tells it.
    let drawn = |key: &String| {
        let name = key.rsplit('/').next()?;
        (name.len() == 16 && name.bytes().all(|b| b.is_ascii_hexdigit())).then(|| name.to_owned())
    };
    let slots: Vec<String> = trace.iter().rev().filter(granted).filter_map(slot).take(GRANTS).collect();
    let names: Vec<String> = slots.iter().filter_map(drawn).collect();
    slots.into_iter().chain(names).collect()
}

/// Grants of a pool that are followed.
const GRANTS: usize = 3;

fn is_read(entry: &Entry) -> bool {
    let what = entry.text.split_once(": ").map(|(_, what)| what);
    entry.to == Lane::Store && what.is_some_and(|what| what.starts_with("read "))
}

/// Entries to either side of an operation among which its losses are looked for.
const LOOK: usize = 200;

/// The slice as a diagram of so many lines at most, with what the short names in it mean. Of a slice that is too
/// long the beginning and the end are shown.
pub fn picture(trace: &[Entry], subjects: &BTreeSet<String>, most: usize) -> String {
    let all = slice(trace, subjects, most);
    let mut aliases = Aliases::default();
    // What it is about has the first names.
    subjects.iter().for_each(|s| drop(aliases.brief(s)));
    let rows = match all.len().checked_sub(most) {
        None | Some(0) => rows(&all, &[], &mut aliases),
        Some(left) => {
            let (first, last) = (&all[..FIRST.min(most)], &all[left + FIRST.min(most)..]);
            rows(first, last, &mut aliases)
        }
    };
    let left = all.len().saturating_sub(most);
    let gap = if left > 0 { format!("{left} entries are left out here, see trace.txt") } else { String::new() };
    format!("{}{}", aliases.legend(), rows.replace("@GAP@", &gap))
}

/// The entries as a diagram, one line each.
pub fn diagram(entries: &[&Entry]) -> String {
    rows(entries, &[], &mut Aliases::default())
}

fn rows(first: &[&Entry], last: &[&Entry], aliases: &mut Aliases) -> String {
    let lanes: Vec<Lane> = first
        .iter()
        .chain(last)
        .flat_map(|e| [e.from, e.to])
        .filter(|lane| *lane != Lane::World)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write!(out, "{:>13} {:>7} ", "time", "event");
    let names: String = lanes.iter().map(|lane| format!("{:<WIDTH$}", lane.to_string())).collect();
    let _ = writeln!(out, "{}", names.trim_end());
    first.iter().for_each(|entry| row(&mut out, entry, &lanes, aliases));
    if !last.is_empty() {
        let _ = writeln!(out, "{:>GUTTER$}@GAP@", "...  ");
    }
    last.iter().for_each(|entry| row(&mut out, entry, &lanes, aliases));
    out
}

fn row(out: &mut String, entry: &Entry, lanes: &[Lane], aliases: &mut Aliases) {
    let place = |lane: Lane| lanes.iter().position(|l| *l == lane);
    let mut row: Vec<char> = vec![' '; lanes.len() * WIDTH];
    for n in 0..lanes.len() {
        row[n * WIDTH] = '|';
    }
    let mut text = aliases.brief(&entry.text);
    match (entry.kind, place(entry.from), place(entry.to)) {
        (Kind::Fault, ..) => {
            row.fill('~');
            text = format!("FAULT {text}");
        }
        (Kind::Message | Kind::Loss, Some(from), Some(to)) if from != to => {
            let (low, high) = (from.min(to) * WIDTH, from.max(to) * WIDTH);
            row[low + 1..high].fill('-');
            row[from * WIDTH] = 'o';
            if entry.kind == Kind::Loss {
                let middle = low + (high - low) / 2;
                row[middle] = 'X';
                let gone = if to > from { middle + 1..high } else { low + 1..middle };
                row[gone].fill(' ');
                row[to * WIDTH] = '|';
            } else {
                row[to * WIDTH] = if to > from { '>' } else { '<' };
            }
        }
        (_, _, Some(to)) => row[to * WIDTH] = if entry.kind == Kind::Mark { '!' } else { '*' },
        _ => {}
    }
    let row: String = row.into_iter().collect();
    let (s, us) = (entry.at / SECOND, entry.at % SECOND);
    let room = SCREEN.saturating_sub(GUTTER + lanes.len() * WIDTH + 1).max(40);
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{s:>6}.{us:06} {:>7} {row}{}", format!("#{}", entry.event), short(&text, room));
}

/// Short names for ids: `J1` for the first job that is named, `G1` for the first group, `G1-3` for its children.
#[derive(Debug, Default)]
struct Aliases {
    jobs: Vec<String>,
    groups: Vec<String>,
}

impl Aliases {
    /// A text with short ids, clocks in seconds from the beginning, and versions cut to six digits.
    fn brief(&mut self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
            if end == 0 {
                out.push(c);
                rest = &rest[c.len_utf8()..];
                continue;
            }
            let (word, after) = rest.split_at(end);
            out.push_str(&self.word(word));
            rest = after;
        }
        out
    }

    fn word(&mut self, word: &str) -> String {
        fn nth(list: &mut Vec<String>, word: &str) -> usize {
            let at = list.iter().position(|known| known == word).unwrap_or(list.len());
            if at == list.len() {
                list.push(word.to_owned());
            }
            at + 1
        }
        // A job that is no child, or a group; they differ in one bit.
        if word.parse::<GroupId>().is_ok() {
            return format!("G{}", nth(&mut self.groups, word));
        }
        if word.parse::<JobId>().is_ok() {
            return format!("J{}", nth(&mut self.jobs, word));
        }
        if word.parse() == Ok(SCORE_MAX) {
            return "max".to_owned();
        }
        if word.len() == 16
            && let Some(us) = word.parse::<u64>().ok().and_then(|clock| clock.checked_sub(EPOCH))
        {
            return format!("{}.{:06}s", us / SECOND, us % SECOND);
        }
        match word.strip_prefix('v') {
            Some(hex) if hex.len() == 16 && hex.bytes().all(|b| b.is_ascii_hexdigit()) => word[..7].to_owned(),
            _ => word.to_owned(),
        }
    }

    /// What the first of them mean.
    fn legend(&self) -> String {
        let name = |kind: char, all: &[String]| {
            let some = all.iter().take(2).enumerate();
            some.map(|(n, id)| format!("{kind}{} = {id}", n + 1)).collect::<Vec<_>>()
        };
        let all = [name('J', &self.jobs), name('G', &self.groups)].concat();
        match all.is_empty() {
            true => String::new(),
            false => format!("{}\n", all.join(", ")),
        }
    }
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
    fn what_was_lost_of_an_operation_is_shown_with_it() {
        let (r, store) = (Lane::Replica(0), Lane::Store);
        let trace = [
            entry(2, r, store, Kind::Loss, "op 7: will come once more 5 ms later"),
            entry(3, r, store, Kind::Message, "op 7: commit of 1"),
            entry(3, r, store, Kind::Effect, "APPLIED: put job/x"),
            entry(3, store, r, Kind::Loss, "op 7: its answer is lost on its way"),
            entry(3, store, r, Kind::Loss, "op 8: its answer is lost on its way"),
        ];
        let about = BTreeSet::from(["x".to_owned()]);
        assert_eq!(slice(&trace, &about, 30).len(), 4);
        let picture = picture(&trace, &about, 30);
        assert!(
            picture.contains("o---X    |        op 7: will") && picture.contains("|   X----o        op 7: its"),
            "{picture}"
        );
    }

    #[test]
    fn a_long_slice_keeps_its_beginning_and_its_end_and_ids_are_short() {
        const JOB: &str = "01HF7YB0MF00B20JA9CK827G25";
        let client = Lane::Caller(Caller::Client(0));
        let trace: Vec<Entry> = (0..50)
            .map(|n| entry(n, client, Lane::Replica(0), Kind::Message, &format!("get {JOB} at 1700000002000000")))
            .collect();
        let picture = picture(&trace, &BTreeSet::from([JOB.to_owned()]), 20);
        assert!(picture.starts_with(&format!("J1 = {JOB}\n")), "{picture}");
        assert_eq!(picture.lines().count(), 1 + 1 + 20 + 1, "{picture}");
        assert!(picture.contains("get J1 at 2.000000s") && picture.contains("30 entries are left out"), "{picture}");
        assert!(picture.contains(" #0 ") && picture.contains(" #49 "), "{picture}");
    }

    #[test]
    fn what_a_violation_names_is_found() {
        assert_eq!(subjects("call 17 was not answered"), BTreeSet::from(["call 17".to_owned()]));
        assert!(subjects("nothing is named here").is_empty());
    }
}

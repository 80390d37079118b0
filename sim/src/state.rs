//! The world as text: what the store holds, decoded, and how each replica stands. As a whole just before and
//! just after one event, and as the changes that each event made.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use leasehold_core::codec;
use leasehold_core::dispatch::Hold;
use leasehold_core::group::record::Group;
use leasehold_core::job::record::{self, History, Job, KeyRecord, Lease, ProgressRecord, QueueRecord};
use leasehold_core::pool::record::{Pool, Slot};
use leasehold_core::store::engine::Stored;
use leasehold_core::store::{SCORE_MAX, Score, Version};
use leasehold_core::{Name, Replica, Stats};

use crate::setup::SECOND;
use crate::store::EPOCH;
use crate::trace::{self, Lane};
use crate::world::{Micros, Phase, World};

/// Members of one index that are listed in a dump.
const MEMBERS: usize = 200;

/// Something that stands otherwise after an event: a record, an index's member, a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub event: u64,
    pub what: String,
    /// How it stands now; `None`: it is gone.
    pub now: Option<String>,
}

/// A time during which something was out of order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    pub lane: Lane,
    pub what: &'static str,
    pub from: u64,
    /// The event after which it was over.
    pub to: Option<u64>,
}

/// Watches a run: the world around one event as a whole, and every change on the way if that is asked for.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    /// The event around which the world is written down.
    pub event: u64,
    /// Every change is kept.
    pub changes_kept: bool,
    pub before: Option<String>,
    pub after: Option<String>,
    pub changes: Vec<Change>,
    pub troubles: Vec<Trouble>,
    records: BTreeMap<Name, (Version, Option<u64>, usize, usize)>,
    members: BTreeMap<(Name, Name), Score>,
    hosts: Vec<String>,
    /// Commits and faults so far: the store is looked at again when there are more.
    touched: (u64, u64),
}

impl World {
    /// An event is about to happen.
    pub fn watch_before(&mut self) {
        if self.watch.as_ref().is_some_and(|w| w.event == self.counts.events + 1) {
            let text = whole(self);
            if let Some(watch) = &mut self.watch {
                watch.before = Some(text);
            }
        }
    }

    /// An event has happened.
    pub fn watch_after(&mut self) {
        let Some(mut watch) = self.watch.take() else { return };
        if watch.changes_kept {
            watch.look(self);
        }
        if watch.event == self.counts.events && watch.after.is_none() {
            watch.after = Some(whole(self));
        }
        self.watch = Some(watch);
    }

    /// The run is over.
    pub fn watch_end(&mut self) {
        // What a run that was cut short finds afterwards means nothing.
        let broken = self.broken.is_some() && !self.stopped();
        if let Some(watch) = &mut self.watch
            && watch.event == self.counts.events
            && (broken || watch.after.is_none())
        {
            watch.after = None;
            self.watch_after();
        }
    }
}

impl Watch {
    pub fn at(event: u64) -> Watch {
        Watch { event, ..Watch::default() }
    }

    fn look(&mut self, world: &World) {
        let event = world.counts.events;
        self.hosts.resize(world.hosts.len(), String::new());
        for r in 0..world.hosts.len() {
            let now = host(world, r);
            if self.hosts[r] != now {
                self.hosts[r].clone_from(&now);
                self.changes.push(Change { event, what: format!("r{r}"), now: Some(now) });
            }
        }
        self.trouble(world);
        let touched: (u64, u64) = (world.counts.commits, world.counts.faults.values().sum());
        if touched != self.touched {
            self.touched = touched;
            self.store(world);
        }
    }

    /// What is down, paused, cut off or slow at this moment.
    fn trouble(&mut self, world: &World) {
        let (now, event) = (world.now, world.counts.events);
        let mut present: Vec<(Lane, &'static str)> = Vec::new();
        for (r, host) in world.hosts.iter().enumerate() {
            let lane = Lane::Replica(r as u8);
            let cut = |until: &Vec<Micros>| until.get(r).is_some_and(|until| *until > now);
            let links = &world.links;
            let all = [
                (host.replica.is_none() && (host.epoch > 0 || host.started > 0), "down"),
                (host.paused, "paused"),
                (cut(&links.to_store) || cut(&links.from_store), "cut off from the store"),
                (cut(&links.to_replica) || cut(&links.from_replica), "cut off from its callers"),
            ];
            present.extend(all.into_iter().filter(|(is, _)| *is).map(|(_, what)| (lane, what)));
        }
        let store = &world.store;
        let all =
            [(store.down_until > now, "unreachable"), (store.slow_until > now, "slow"), (store.model.full, "full")];
        present.extend(all.into_iter().filter(|(is, _)| *is).map(|(_, what)| (Lane::Store, what)));
        for open in self.troubles.iter_mut().filter(|t| t.to.is_none()) {
            match present.iter().position(|p| *p == (open.lane, open.what)) {
                Some(at) => {
                    present.swap_remove(at);
                }
                None => open.to = Some(event),
            }
        }
        self.troubles.extend(present.into_iter().map(|(lane, what)| Trouble { lane, what, from: event, to: None }));
    }

    fn store(&mut self, world: &World) {
        let event = world.counts.events;
        let model = &world.store.model;
        let mut records = BTreeMap::new();
        for (key, stored) in model.records(b"") {
            let now = (stored.version, stored.expiry, stored.bytes.as_ptr() as usize, stored.bytes.len());
            if self.records.get(key) != Some(&now) {
                self.changes.push(Change { event, what: key.to_string(), now: Some(described(key, stored)) });
            }
            records.insert(key.clone(), now);
        }
        for key in self.records.keys().filter(|key| !records.contains_key(*key)) {
            self.changes.push(Change { event, what: key.to_string(), now: None });
        }
        self.records = records;
        let mut members = BTreeMap::new();
        for (index, _) in model.books().iter() {
            for (score, member) in model.members(index) {
                members.insert((index.clone(), member), score);
            }
        }
        let named = |(index, member): &(Name, Name)| format!("{index} : {member}");
        for (place, now) in &members {
            if self.members.get(place) != Some(now) {
                self.changes.push(Change { event, what: named(place), now: Some(score(*now)) });
            }
        }
        for place in self.members.keys().filter(|place| !members.contains_key(*place)) {
            self.changes.push(Change { event, what: named(place), now: None });
        }
        self.members = members;
    }
}

fn seconds(us: Micros) -> String {
    format!("{}.{:06}", us / SECOND, us % SECOND)
}

/// A time by the store's clock, counted from the beginning of the run.
pub fn clock(at: u64) -> String {
    match at.checked_sub(EPOCH) {
        Some(us) => format!("{} s", seconds(us)),
        None => at.to_string(),
    }
}

fn score(score: Score) -> String {
    match score {
        SCORE_MAX => "max".into(),
        at if at >= EPOCH => clock(at),
        n => n.to_string(),
    }
}

fn described(key: &Name, stored: &Stored) -> String {
    let expires = stored.expiry.map_or_else(String::new, |at| format!(", expires {}", clock(at)));
    format!("{:?} of {}{expires}: {}", stored.version, clock(stored.at), decoded(key, &stored.bytes))
}

/// What a record says, on one line.
pub fn decoded(key: &Name, bytes: &bytes::Bytes) -> String {
    macro_rules! as_is {
        ($kind:ty) => {
            codec::decode::<$kind>(bytes).map(|record| format!("{record:?}"))
        };
    }
    let kind = key.as_str().and_then(|k| k.split_once('/')).map_or("", |(kind, _)| kind);
    let text = match kind {
        "job" => as_is!(Job),
        "lease" => as_is!(Lease),
        "history" => as_is!(History),
        "progress" => as_is!(ProgressRecord),
        "key" => as_is!(KeyRecord),
        "queue" => as_is!(QueueRecord),
        "group" => as_is!(Group),
        "pool" => as_is!(Pool),
        "slot" => as_is!(Slot),
        "hold" => as_is!(Hold),
        "payload" | "result" => record::decode_content(bytes).map(|content| format!("{content:?}")),
        _ => Ok(format!("{} bytes", bytes.len())),
    };
    text.unwrap_or_else(|why| format!("cannot be read ({why:?}), {} bytes", bytes.len()))
}

/// Statistics that are not 0, by name, without the histograms.
fn counted(stats: &Stats) -> String {
    let text = format!("{stats:?}");
    let mut flat = String::new();
    for part in text.trim_start_matches("Stats { ").trim_end_matches(" }").split("Durations {") {
        // After the first, a part begins with a histogram.
        flat.push_str(part.split_once('}').map_or(part, |(_, rest)| rest));
    }
    let dull =
        |s: &&str| !s.ends_with(": ") && !s.ends_with(": 0") && !s.ends_with(": false") && !s.ends_with(": None");
    flat.split(", ").filter(dull).collect::<Vec<_>>().join(", ")
}

/// How a replica stands.
fn host(world: &World, r: usize) -> String {
    let Some(host) = world.hosts.get(r) else { return String::new() };
    let Some(replica) = &host.replica else { return format!("life {}: down", host.epoch) };
    let mut out = format!("life {}, up since {} s", host.epoch, seconds(host.started));
    // Writing to a string cannot fail.
    let _ = match host.paused {
        true => write!(out, ", PAUSED with {} inputs waiting", host.backlog.len()),
        false => Ok(()),
    };
    if host.stepped > 0 || host.drift_ppm != 0 {
        let _ = write!(out, ", clock stepped by {} s and {} ppm fast", seconds(host.stepped), host.drift_ppm);
    }
    let timer = host.timer.map_or_else(|| "none".to_owned(), |ms| format!("{} s of its own", seconds(ms * 1_000)));
    let open: Vec<String> = host.open.iter().map(u32::to_string).collect();
    let open = if open.is_empty() { "none".to_owned() } else { open.join(", ") };
    let stats = Replica::stats(replica);
    let _ = write!(out, "; next timer {timer}; open calls {open}; {}", counted(&stats));
    out
}

/// The whole world, for a reader.
pub fn whole(world: &World) -> String {
    let mut out = String::new();
    let w = &mut out;
    let phase = match world.phase {
        Phase::Chaos => "chaos",
        Phase::Calm => "calm",
        Phase::Quiet => "quiet",
        Phase::Script => "script",
    };
    // Writing to a string cannot fail.
    let _ = writeln!(w, "after event {}, {} s, phase {phase}", world.counts.events, seconds(world.now));
    let _ = writeln!(w, "\n== replicas");
    for r in 0..world.hosts.len() {
        let _ = writeln!(w, "r{r}  {}", host(world, r));
    }
    let links = &world.links;
    let ways = [
        ("to the store", &links.to_store),
        ("from the store", &links.from_store),
        ("from callers", &links.to_replica),
        ("to callers", &links.from_replica),
    ];
    for (way, until) in ways {
        for (r, until) in until.iter().enumerate().filter(|(_, until)| **until > world.now) {
            let _ = writeln!(w, "r{r}  cut {way} until {} s", seconds(*until));
        }
    }
    let _ = writeln!(w, "\n== calls that nobody has heard of yet");
    for call in world.ledger.iter().filter(|c| c.heard.is_none()) {
        let arrived = match &call.arrived {
            Some((instant, life)) => format!("arrived {} s in life {life}", seconds(instant.now)),
            None => "not arrived".into(),
        };
        let (from, request) = (Lane::Caller(call.caller), trace::short(&trace::request(&call.request), 400));
        let _ = writeln!(
            w,
            "call {} {from} -> r{}, sent {} s, {arrived}{}: {request}",
            call.id,
            call.replica,
            seconds(call.sent),
            if call.replied { ", answered" } else { "" }
        );
    }
    let _ = writeln!(w, "\n== on their way, in order");
    for (at, from, to, text) in world.under_way() {
        let _ = writeln!(w, "{:>13} {from} -> {to}: {}", seconds(at), trace::short(&text, 200));
    }
    store(w, world);
    out
}

fn store(w: &mut String, world: &World) {
    let model = &world.store.model;
    let mut state = String::new();
    if model.full {
        state.push_str(", full");
    }
    if world.store.down_until > world.now {
        let _ = write!(state, ", unreachable until {} s", seconds(world.store.down_until));
    }
    if world.store.slow_until > world.now {
        let _ = write!(state, ", slow until {} s", seconds(world.store.slow_until));
    }
    let _ = writeln!(
        w,
        "\n== the store, its clock at {} (clocks count from the beginning of the run){state}",
        clock(model.clock())
    );
    for (key, stored) in model.records(b"") {
        let expired = if stored.head().is_unexpired(model.clock()) { "" } else { "EXPIRED " };
        let _ = writeln!(w, "{key}  {expired}{}", described(key, stored));
    }
    let _ = writeln!(w, "\n== its indexes, member @ score");
    for (index, _) in model.books().iter() {
        let members = model.members(index);
        let listed: Vec<String> =
            members.iter().take(MEMBERS).map(|(at, member)| format!("{member} @ {}", score(*at))).collect();
        let more = if members.len() > MEMBERS { ", …" } else { "" };
        let _ = writeln!(w, "{index} ({}): {}{more}", members.len(), listed.join(", "));
    }
}

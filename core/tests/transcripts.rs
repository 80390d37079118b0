//! Protocols as transcripts that read like a specification: each file in `transcripts/` is played on
//! one or two replicas over the model store, and every line's answer is compared.
//!
//! `UPDATE_TRANSCRIPTS=1 cargo test -p leasehold-core --test transcripts` writes the answers anew.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod support;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use leasehold_core::event::Event;
use leasehold_core::ids::{JobId, Token};
use leasehold_core::job::record::{Backoff, Class, ErrorInfo, Status};
use leasehold_core::opaque::{Content, Opaque};
use leasehold_core::request::{
    Acquire, Beat, Claim, Complete, EventCursor, Fail, Held, List, SetPool, SlotId, SlotOf, Start, Submit,
};
use leasehold_core::store::keys;
use leasehold_core::{Failure, Input, Outcome, Request, RequestId, Response};
use support::{START, World};

#[test]
fn every_transcript_plays_as_written() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transcripts");
    let update = std::env::var_os("UPDATE_TRANSCRIPTS").is_some();
    let mut paths: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty());
    let mut wrong = String::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).unwrap();
        let played = play(&text);
        if update {
            std::fs::write(&path, &played).unwrap();
        } else if played != text {
            for (was, is) in text.lines().zip(played.lines()).filter(|(a, b)| a != b) {
                writeln!(wrong, "{}:\n  written {was}\n  played  {is}", path.display()).unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

struct Player {
    world: World,
    jobs: BTreeMap<String, JobId>,
    tokens: BTreeMap<String, Token>,
    polls: BTreeMap<String, (usize, RequestId)>,
    slots: BTreeMap<String, SlotId>,
    events: EventCursor,
}

fn play(text: &str) -> String {
    let mut player = Player {
        world: World::new(2),
        jobs: BTreeMap::new(),
        tokens: BTreeMap::new(),
        polls: BTreeMap::new(),
        slots: BTreeMap::new(),
        events: EventCursor::default(),
    };
    let mut out = String::new();
    for line in text.lines() {
        let command = line.split("->").next().unwrap().trim_end();
        if command.trim().is_empty() || command.starts_with('#') {
            out.push_str(line);
        } else {
            let answer = player.line(command);
            write!(out, "{command:<74} -> {answer}").unwrap();
        }
        out.push('\n');
    }
    out
}

type Args<'a> = BTreeMap<&'a str, &'a str>;

impl Player {
    fn line(&mut self, line: &str) -> String {
        let mut words = line.split_whitespace();
        assert_eq!(words.next(), Some("at"), "{line}");
        let at: u64 = words.next().unwrap().parse().unwrap();
        self.world.to(at);
        let what = words.next().unwrap();
        let args: Args = words.filter_map(|w| w.split_once('=')).collect();
        let replica = args.get("on").map_or(0, |n| n.parse().unwrap());
        let tenant = || String::from("default");
        let queue = || String::from(*args.get("queue").unwrap_or(&"q"));
        let number = |name: &str| args.get(name).map(|n| n.parse::<u64>().unwrap());
        match what {
            "run" => self.events(),
            "submit" => {
                let payload = args.get("payload").unwrap_or(&"1").to_string();
                let mut s = Submit::new("default", queue(), Content::json(payload));
                s.key = args.get("key").map(|k| k.to_string());
                s.class = args.get("class").map_or(Class::System, |c| Class::parse(c).unwrap());
                s.start = number("delay").map_or(Start::Now, Start::DelayMs);
                s.max_attempts = number("attempts").map(|n| n as u32);
                s.max_deliveries = number("deliveries").map(|n| n as u32);
                s.lease_ms = number("lease");
                s.run_timeout_ms = number("run_timeout");
                s.progress_timeout_ms = number("progress_timeout");
                s.queue_ttl_ms = number("queue_ttl");
                s.retention_ms = number("retention");
                s.key_ttl_ms = number("key_ttl");
                s.max_age_ms = number("max_age");
                s.backoff = Some(Backoff {
                    base_ms: number("backoff").unwrap_or(2_000),
                    max_ms: 3_600_000,
                    factor_milli: 2_000,
                    jitter_milli: 0,
                });
                let outcome = self.world.submit(replica, s);
                if let Ok(Response::Created(view) | Response::Existing(view)) = &outcome {
                    let name = args.get("job").unwrap_or_else(|| panic!("{line}"));
                    self.jobs.entry((*name).into()).or_insert(view.id);
                }
                self.say(outcome)
            }
            "claim" | "poll" => {
                let claim = Claim {
                    tenant: tenant(),
                    worker: args.get("worker").unwrap_or(&"w").to_string(),
                    queues: queue().split(',').map(String::from).collect(),
                    max: number("max").unwrap_or(1) as usize,
                    wait_ms: number("wait").unwrap_or(0),
                    lease_ms: number("lease"),
                    claim_id: args.get("id").map(|c| c.to_string()),
                };
                let id = self.world.ask(replica, Request::Claim(Box::new(claim)));
                self.world.settle();
                match self.world.answer(replica, id) {
                    Some(outcome) => self.say(outcome),
                    None => {
                        self.polls
                            .insert((*args.get("name").unwrap_or_else(|| panic!("{line}"))).into(), (replica, id));
                        "waits".into()
                    }
                }
            }
            "pool" => {
                let asked = SetPool {
                    tenant: tenant(),
                    pool: args["name"].into(),
                    total: number("total"),
                    batch_max: number("batch"),
                    lease_ms: number("lease"),
                };
                let outcome = self.world.call(replica, Request::SetPool(asked));
                self.say(outcome)
            }
            "look" => {
                let outcome = self.world.call(replica, Request::Pool { tenant: tenant(), pool: args["pool"].into() });
                self.say(outcome)
            }
            "pools" => {
                let outcome = self.world.call(replica, Request::Pools);
                self.say(outcome)
            }
            "unpool" => {
                let outcome = self.world.call(replica, Request::DeletePool { pool: args["name"].into() });
                self.say(outcome)
            }
            "slot" => {
                let asked = Acquire {
                    tenant: tenant(),
                    pool: args["pool"].into(),
                    slot: args.get("id").map(|s| s.to_string()),
                    class: args.get("class").map_or(Class::System, |c| Class::parse(c).unwrap()),
                    cost: number("cost").unwrap_or(1) as u32,
                    holder: None,
                    lease_ms: number("lease"),
                    wait_ms: number("wait").unwrap_or(0),
                };
                let id = self.world.ask(replica, Request::Acquire(Box::new(asked)));
                self.world.settle();
                let name = args.get("as").or_else(|| args.get("id")).unwrap_or_else(|| panic!("{line}"));
                match self.world.answer(replica, id) {
                    Some(outcome) => self.slot(name, outcome),
                    None => {
                        self.polls.insert((*name).into(), (replica, id));
                        "waits".into()
                    }
                }
            }
            "waited" => {
                let name = args["as"];
                let (replica, id) = *self.polls.get(name).unwrap_or_else(|| panic!("{line}"));
                match self.world.answer(replica, id) {
                    Some(outcome) => self.slot(name, outcome),
                    None => "still waits".into(),
                }
            }
            "gone" => {
                let (replica, id) = *self.polls.get(args["as"]).unwrap_or_else(|| panic!("{line}"));
                self.world.input(replica, Input::Cancelled { id });
                self.world.settle();
                "ok".into()
            }
            "refresh" | "free" => {
                let (tenant, pool) = (tenant(), args["pool"].into());
                let slot = match args.get("as") {
                    Some(name) => self.slots[*name].clone(),
                    None => SlotId { slot: args["id"].into(), nonce: None },
                };
                let request = match what {
                    "refresh" => Request::RefreshSlot { tenant, pool, slot },
                    _ => Request::ReleaseSlot { tenant, pool, slot },
                };
                let outcome = self.world.call(replica, request);
                self.say(outcome)
            }
            "drain" => {
                let outcome = self.world.call(replica, Request::Drain);
                self.say(outcome)
            }
            "polled" => {
                let (replica, id) = *self.polls.get(args["name"]).unwrap_or_else(|| panic!("{line}"));
                match self.world.answer(replica, id) {
                    Some(outcome) => self.say(outcome),
                    None => "still waits".into(),
                }
            }
            "beat" => {
                let beat = Beat {
                    held: self.held(&args),
                    progress: args.get("progress").map(|p| Opaque::new(p.to_string())),
                    seq: number("seq"),
                };
                let outcome = self.world.call(replica, Request::Heartbeat(beat));
                self.say(outcome)
            }
            "complete" => {
                let result = args.get("result").map(|r| Content::json(r.to_string()));
                let complete = Complete { held: self.held(&args), result };
                let outcome = self.world.call(replica, Request::Complete(Box::new(complete)));
                self.say(outcome)
            }
            "fail" => {
                let fail = Fail {
                    held: self.held(&args),
                    error: ErrorInfo {
                        message: args.get("error").unwrap_or(&"boom").to_string(),
                        ..ErrorInfo::default()
                    },
                    retryable: args.get("retryable") != Some(&"no"),
                    retry_in_ms: number("retry_in"),
                };
                let outcome = self.world.call(replica, Request::Fail(Box::new(fail)));
                self.say(outcome)
            }
            "release" => {
                let outcome = self.world.call(replica, Request::Release(self.held(&args)));
                self.say(outcome)
            }
            "get" | "cancel" | "retry" | "delete" | "result" | "payload" | "why" => {
                let (tenant, job) = (tenant(), self.jobs[args["job"]]);
                let request = match what {
                    "get" => Request::Get { tenant, job },
                    "cancel" => Request::Cancel { tenant, job },
                    "retry" => Request::Retry { tenant, job },
                    "delete" => Request::Delete { tenant, job },
                    "result" => Request::Result { tenant, job },
                    "payload" => Request::Payload { tenant, job },
                    _ => Request::Why { tenant, job },
                };
                let outcome = self.world.call(replica, request);
                self.say(outcome)
            }
            "list" => {
                let status = args.get("status").map(|s| Status::parse(s).unwrap());
                let limit = number("limit").unwrap_or(100) as usize;
                let mut ids = Vec::new();
                let mut cursor = None;
                loop {
                    let queue = args.get("queue").map(|q| q.to_string());
                    let list = List { tenant: tenant(), queue, status, limit, cursor };
                    match self.world.call(replica, Request::List(list)) {
                        Ok(Response::Jobs { jobs, next }) => {
                            ids.extend(jobs.iter().map(|j| format!("{}:{}", self.name(j.id), j.status.text())));
                            cursor = next;
                        }
                        other => return format!("{other:?}"),
                    }
                    if cursor.is_none() {
                        return format!("[{}]", ids.join(" "));
                    }
                }
            }
            "pause" => {
                let reason = args.get("reason").map(|r| r.to_string());
                let outcome = self.world.call(replica, Request::Pause { tenant: tenant(), queue: queue(), reason });
                self.say(outcome)
            }
            "resume" => {
                let outcome = self.world.call(replica, Request::Resume { tenant: tenant(), queue: queue() });
                self.say(outcome)
            }
            "set" => {
                let request = Request::SetQueue { tenant: tenant(), queue: queue(), lease_ms: number("lease") };
                let outcome = self.world.call(replica, request);
                self.say(outcome)
            }
            "queue" => {
                let outcome = self.world.call(replica, Request::Queue { tenant: tenant(), queue: queue() });
                self.say(outcome)
            }
            "purge" => {
                let status = args.get("status").map_or(Status::Queued, |s| Status::parse(s).unwrap());
                let outcome = self.world.call(replica, Request::Purge { tenant: tenant(), queue: queue(), status });
                self.say(outcome)
            }
            // Faults, by hand.
            "evict" => {
                let job = self.jobs[args["job"]];
                let key = match args["record"] {
                    "job" => keys::job(job),
                    "payload" => keys::payload(job),
                    "lease" => keys::lease(job),
                    other => panic!("{other}"),
                };
                format!("{}", self.world.store.evict(&key))
            }
            "unindex" => {
                let job = self.jobs[args["job"]];
                let index = match args["index"] {
                    "leases" => keys::LEASES,
                    "due" => keys::DUE,
                    status => keys::status("default", &queue(), Class::System, Status::parse(status).unwrap()),
                };
                format!("{}", self.world.store.drop_member(&index, &keys::member(job)))
            }
            "restart" => {
                self.world.restart(replica, 100 + at as u8);
                "ok".into()
            }
            "store" => {
                self.world.store.full = args.contains_key("full");
                "ok".into()
            }
            "records" => {
                self.world.store.collect_garbage();
                let names: Vec<String> = self
                    .world
                    .store
                    .records(b"")
                    .map(|(k, _)| k.as_str().unwrap().split('/').next().unwrap().to_string())
                    .collect();
                format!("{names:?}, {} indexes", self.world.store.books().iter().count())
            }
            other => panic!("unknown command {other}"),
        }
    }

    fn held(&self, args: &Args) -> Held {
        Held {
            tenant: "default".into(),
            job: self.jobs[args["job"]],
            token: args.get("token").and_then(|t| self.tokens.get(*t)).copied(),
        }
    }

    fn slot(&mut self, name: &str, outcome: Outcome) -> String {
        if let Ok(Response::Slot { id, .. }) = &outcome {
            self.slots.insert(name.into(), id.clone());
        }
        self.say(outcome)
    }

    fn name(&self, id: JobId) -> String {
        self.jobs.iter().find(|(_, j)| **j == id).map_or_else(|| "?".into(), |(n, _)| n.clone())
    }

    /// The events since this was last asked.
    fn events(&mut self) -> String {
        let request = Request::Events { tenant: "default".into(), after: self.events, limit: 1_000, wait_ms: 0 };
        match self.world.call(0, request) {
            Ok(Response::Events { events, next }) => {
                self.events = next;
                let say = |e: &Event| {
                    format!(
                        "{}:{}",
                        self.name(e.of.job().unwrap()),
                        e.kind.text().strip_prefix("job.").unwrap_or_default()
                    )
                };
                format!("[{}]", events.iter().map(|e| say(&e.event)).collect::<Vec<_>>().join(" "))
            }
            other => format!("{other:?}"),
        }
    }

    fn ms(&self, clock: u64) -> u64 {
        (clock - START) / 1_000
    }

    fn say(&mut self, outcome: Outcome) -> String {
        match outcome {
            Err(Failure::Invalid { field, detail }) => format!("invalid {field}: {detail}"),
            Err(Failure::PoolFull { position, estimated_wait_ms, retry_after_ms }) => {
                format!("full position={position} estimate={estimated_wait_ms} retry={retry_after_ms}")
            }
            Err(failure) => format!("refused {}", failure.code()),
            Ok(Response::Slot { expires_at, .. } | Response::SlotRefreshed { expires_at }) => {
                format!("until {}", self.ms(expires_at))
            }
            Ok(Response::SlotReleased) => "ok".into(),
            Ok(Response::PoolDeleted) => "deleted".into(),
            Ok(Response::Pool(pool)) => self.pool(&pool),
            Ok(Response::Pools(pools)) => {
                format!("[{}]", pools.iter().map(|p| self.pool(p)).collect::<Vec<_>>().join(", "))
            }
            Ok(Response::Created(v)) => format!("created {} {}", self.name(v.id), v.status.text()),
            Ok(Response::Existing(v)) => format!("existing {} {}", self.name(v.id), v.status.text()),
            Ok(Response::Job(v)) => {
                let mut s =
                    format!("{} attempt={}/{} deliveries={}", v.status.text(), v.attempt, v.max_attempts, v.deliveries);
                if let Some(p) = v.position {
                    write!(s, " position={p}").unwrap();
                }
                if let Some(l) = &v.lease {
                    write!(s, " lease={}@{}", l.worker, self.ms(l.expires_at)).unwrap();
                }
                if let Some(p) = &v.progress {
                    write!(s, " progress={}", String::from_utf8_lossy(&p.value.bytes)).unwrap();
                }
                if matches!(v.status, Status::Scheduled | Status::Retrying) {
                    write!(s, " run_at={}", self.ms(v.run_at)).unwrap();
                }
                if let Some(r) = &v.reason {
                    write!(s, " reason={r}").unwrap();
                }
                let ends: Vec<_> = v.attempts.iter().map(|a| a.outcome.text()).collect();
                write!(s, " [{}]", ends.join(" ")).unwrap();
                s
            }
            Ok(Response::Claimed(jobs)) => {
                let mut all = Vec::new();
                for job in jobs {
                    let name = self.name(job.id);
                    // Tokens are named by job and delivery: a1, a2, …
                    let token = format!("{name}{}", job.delivery);
                    self.tokens.insert(token.clone(), job.token);
                    let payload = job.payload.map(|p| String::from_utf8_lossy(&p.data.bytes).into_owned());
                    all.push(format!(
                        "{name} token={token} attempt={} until={} payload={}",
                        job.attempt,
                        self.ms(job.lease_expires_at),
                        payload.unwrap_or_else(|| "omitted".into())
                    ));
                }
                format!("[{}]", all.join(", "))
            }
            Ok(Response::Beat { lease_expires_at, cancel_requested }) => match lease_expires_at {
                Some(at) => format!("until {}", self.ms(at)),
                None => format!("stop, cancel_requested={cancel_requested}"),
            },
            Ok(Response::Completed) => "ok".into(),
            Ok(Response::Released { status }) => format!("released {}", status.text()),
            Ok(Response::Deleted) => "deleted".into(),
            Ok(Response::Failed { status, run_at }) => match run_at {
                Some(at) => format!("{} at {}", status.text(), self.ms(at)),
                None => status.text().into(),
            },
            Ok(Response::Content(c)) => String::from_utf8_lossy(&c.data.bytes).into_owned(),
            Ok(Response::NoContent) => "no content".into(),
            Ok(Response::Queue(q)) => self.queue(&q),
            Ok(Response::Purged { queue, purged, left }) => {
                format!("purged {purged}, left {left}, {}", self.queue(&queue))
            }
            Ok(Response::Why(w)) => format!("{w:?}").replace(&format!("{}", START / 1_000_000), "T"),
            Ok(other) => format!("{other:?}"),
        }
    }

    fn pool(&self, p: &leasehold_core::request::PoolView) -> String {
        let waiting: Vec<String> =
            p.waiting.iter().filter(|w| w.1 > 0).map(|(class, n)| format!("{}={n}", class.text())).collect();
        let mut held: Vec<String> = Vec::new();
        for h in &p.holders {
            let name =
                self.slots.iter().find(|(_, id)| h.of == SlotOf::Caller((*id).clone())).map_or("?", |(name, _)| name);
            held.push(format!("{name}@{}", self.ms(h.expires_at)));
        }
        let batch = p.batch_max.map_or(String::new(), |n| format!(" batch={}/{n}", p.batch_in_use));
        format!("{} {}/{}{batch} [{}] waiting [{}]", p.name, p.in_use, p.total, held.join(" "), waiting.join(" "))
    }

    fn queue(&self, q: &leasehold_core::request::QueueView) -> String {
        let depth: Vec<String> =
            q.depth.iter().filter(|d| d.2 > 0).map(|(c, s, n)| format!("{}/{}={n}", c.text(), s.text())).collect();
        let paused = if q.paused { " paused" } else { "" };
        format!("{}{paused} lease={} [{}]", q.name, q.lease_ms, depth.join(" "))
    }
}

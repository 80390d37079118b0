//! A replica on a store on disk, in this process, as fast as it goes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use leasehold_core::opaque::Content;
use leasehold_core::request::{Claim, Complete, Held, Start, Submit};
use leasehold_core::store::Store as _;
use leasehold_core::{Config, Input, Outcome, Output, Outputs, Replica, Request, RequestId, Response};
use leasehold_disk::{DiskStore, Options};

use crate::state::TENANT;

const START: u64 = 1_700_000_000_000_000;
/// Jobs of one request.
const BATCH: usize = 500;

pub struct Local {
    pub store: DiskStore,
    pub clock: Arc<AtomicU64>,
    replica: Replica,
    next: u64,
}

/// Options with a clock that is set by hand.
pub fn options(clock: &Arc<AtomicU64>, log_keep: u64) -> Options {
    let clock = clock.clone();
    Options { clock: Some(Arc::new(move || clock.load(Ordering::SeqCst))), log_keep, ..Options::default() }
}

impl Local {
    /// # Errors
    /// What the store says.
    pub fn open(folder: &Path, log_keep: u64) -> Result<Local, String> {
        let clock = Arc::new(AtomicU64::new(START));
        let store = DiskStore::open(folder, options(&clock, log_keep)).map_err(|e| e.to_string())?;
        let config = Config { mailbox: 1_000_000, scrub_ms: 0, ..Config::default() };
        Ok(Local { store, clock, replica: Replica::new(config, [3; 32]), next: 0 })
    }

    fn now_ms(&self) -> u64 {
        (self.clock.load(Ordering::SeqCst) - START) / 1_000
    }

    /// Time passes, and what is due at the end of it happens.
    ///
    /// # Errors
    /// What the store says.
    pub fn pass(&mut self, ms: u64) -> Result<(), String> {
        self.clock.fetch_add(1_000 * ms, Ordering::SeqCst);
        self.run(Vec::new()).map(|_| ())
    }

    /// Asks all at once, and runs until all are answered and nothing is left to do at this moment.
    ///
    /// # Errors
    /// What was not answered well.
    pub fn run(&mut self, requests: Vec<Request>) -> Result<Vec<Outcome>, String> {
        let mut out = Outputs::new();
        let mut replies = Vec::new();
        let now = self.now_ms();
        for request in requests {
            self.next += 1;
            self.replica.step(now, Input::Request { id: RequestId(self.next), request }, &mut out);
        }
        loop {
            if self.replica.next_timer().is_none_or(|at| at <= now) {
                self.replica.step(now, Input::Timer, &mut out);
            }
            let mut calls = Vec::new();
            for output in std::mem::take(&mut out) {
                match output {
                    Output::Store { id, op } => calls.push((id, op)),
                    Output::Reply { outcome, .. } => replies.push(outcome),
                    Output::Mark(_) => {}
                }
            }
            if calls.is_empty() {
                return Ok(replies);
            }
            let mut answers = BTreeMap::new();
            self.store.process(calls, |id, reply| {
                answers.insert(id, reply);
            });
            if let Some(why) = self.store.poisoned() {
                return Err(why.to_owned());
            }
            for (id, reply) in answers {
                self.replica.step(now, Input::StoreReply { id, reply }, &mut out);
            }
            for topic in self.store.notified() {
                self.replica.step(now, Input::Notified { topic }, &mut out);
            }
        }
    }

    /// Submits jobs to a queue; with a delay if one is given.
    ///
    /// # Errors
    /// What was not answered well.
    pub fn submit(&mut self, queue: &str, jobs: u64, delay_ms: Option<u64>, retention_ms: u64) -> Result<(), String> {
        let mut left = jobs as usize;
        while left > 0 {
            let n = left.min(BATCH);
            left -= n;
            let one = |i: usize| {
                let text =
                    format!("{{\"to\":\"someone-{i}@example.org\",\"template\":\"welcome\",\"n\":{}}}", left + i);
                let mut submit = Submit::new(TENANT, queue, Content::json(text));
                submit.retention_ms = Some(retention_ms);
                submit.start = delay_ms.map_or(Start::Now, Start::DelayMs);
                Request::Submit(Box::new(submit))
            };
            for outcome in self.run(vec![Request::Batch((0..n).map(one).collect())])? {
                match outcome {
                    Ok(Response::Batch(each)) if each.iter().all(|o| matches!(o, Ok(Response::Created(_)))) => {}
                    other => return Err(format!("a submit: {other:?}")),
                }
            }
        }
        Ok(())
    }

    /// Claims and completes everything in a queue; returns how many jobs that were.
    ///
    /// # Errors
    /// What was not answered well.
    pub fn drain(&mut self, queue: &str) -> Result<u64, String> {
        let mut done = 0;
        loop {
            let claim = Claim {
                tenant: TENANT.into(),
                worker: "w".into(),
                queues: vec![queue.into()],
                max: BATCH,
                wait_ms: 0,
                lease_ms: None,
                claim_id: None,
            };
            let outcomes = self.run(vec![Request::Claim(Box::new(claim))])?;
            let Some(Ok(Response::Claimed(jobs))) = outcomes.into_iter().next() else {
                return Err("a claim was not answered".into());
            };
            if jobs.is_empty() {
                return Ok(done);
            }
            done += jobs.len() as u64;
            let complete = |job: leasehold_core::request::Leased| {
                let held = Held { tenant: TENANT.into(), job: job.id, token: Some(job.token) };
                Request::Complete(Box::new(Complete { held, result: Some(Content::json("{\"ok\":true}")) }))
            };
            self.run(vec![Request::Batch(jobs.into_iter().map(complete).collect())])?;
        }
    }
}

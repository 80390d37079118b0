//! What clients and workers ask next.

use leasehold_core::Request;
use leasehold_core::job::record::{Class, ErrorInfo, Status};
use leasehold_core::opaque::{Content, Opaque};
use leasehold_core::request::{Beat, Claim, Complete, Fail, Held, Start, Submit};

use super::{BACKLOG, World};
use crate::state::TENANT;

const QUEUES: [&str; 3] = ["mail", "ocr", "a/b"];

impl World {
    pub(super) fn request(&mut self) -> Request {
        let tenant = || TENANT.to_owned();
        let queue = QUEUES[self.rng.below(3) as usize].to_owned();
        let job = match self.jobs.len() as u64 {
            0 => None,
            n => Some(self.jobs[self.rng.below(n) as usize]),
        };
        let held = match self.held.len() as u64 {
            0 => None,
            n => {
                let (job, token) = self.held.swap_remove(self.rng.below(n) as usize);
                Some(Held { tenant: tenant(), job, token: Some(token) })
            }
        };
        match (self.rng.below(24), held, job) {
            (0..=5, Some(held), _) => Request::Complete(Box::new(Complete { held, result: self.result() })),
            (6..=7, Some(held), _) => {
                let error = ErrorInfo { message: "it broke".into(), ..ErrorInfo::default() };
                let (retryable, retry_in_ms) = (self.rng.chance(800), self.rng.chance(300).then_some(700));
                Request::Fail(Box::new(Fail { held, error, retryable, retry_in_ms }))
            }
            (8, Some(held), _) => Request::Release(held),
            (9..=10, Some(held), _) => {
                if let Some(token) = held.token {
                    self.held.push((held.job, token));
                }
                let progress = self.rng.chance(500).then(|| Opaque::new("{\"done\":0.5}"));
                Request::Heartbeat(Beat { held, progress, seq: None })
            }
            (kind, Some(held), _) if kind < 20 => {
                self.held.extend(held.token.map(|token| (held.job, token)));
                self.submit_or_claim(queue)
            }
            (20, _, Some(job)) => Request::Cancel { tenant: tenant(), job },
            (21, _, Some(job)) => Request::Retry { tenant: tenant(), job },
            (22, _, Some(job)) if self.rng.chance(300) => Request::Delete { tenant: tenant(), job },
            (22, _, Some(job)) => Request::Get { tenant: tenant(), job },
            (23, _, _) => match self.rng.below(4) {
                0 => Request::Pause { tenant: tenant(), queue, reason: None },
                1 => Request::Purge { tenant: tenant(), queue, status: Status::Dead },
                _ => Request::Resume { tenant: tenant(), queue },
            },
            _ => self.submit_or_claim(queue),
        }
    }

    fn submit_or_claim(&mut self, queue: String) -> Request {
        if self.jobs.len() - self.completed.len().min(self.jobs.len()) < BACKLOG && self.rng.chance(550) {
            return match self.rng.chance(150) {
                true => Request::Batch((0..5).map(|_| self.submit(queue.clone())).collect()),
                false => self.submit(queue),
            };
        }
        Request::Claim(Box::new(Claim {
            tenant: TENANT.into(),
            worker: "w".into(),
            queues: vec![queue],
            max: 1 + self.rng.below(5) as usize,
            wait_ms: 0,
            lease_ms: self.rng.chance(500).then_some(3_000),
            claim_id: None,
        }))
    }

    fn submit(&mut self, queue: String) -> Request {
        let len = self.pick(&[0, 20, 300, 3_000, 9_000]) as usize;
        let payload = format!("\"{}\"", "x".repeat(len));
        let mut submit = Submit::new(TENANT, queue, Content::json(payload));
        submit.class = [Class::Interactive, Class::System, Class::Batch][self.rng.below(3) as usize];
        if self.rng.chance(500) {
            self.keys += 1;
            // Some are repeats.
            submit.key = Some(format!("k{}", self.keys - self.rng.below(3).min(self.keys)));
        }
        if self.rng.chance(200) {
            submit.start = Start::DelayMs(1_000);
        }
        submit.max_attempts = Some(3);
        submit.queue_ttl_ms = self.rng.chance(100).then_some(2_000);
        submit.retention_ms = Some(self.pick(&[0, 5_000, 3_600_000]));
        Request::Submit(Box::new(submit))
    }

    fn result(&mut self) -> Option<Content> {
        let len = self.pick(&[0, 10, 5_000]) as usize;
        (len > 0).then(|| Content::json(format!("\"{}\"", "r".repeat(len))))
    }
}

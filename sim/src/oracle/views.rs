//! honest-replies for what is only looked at: jobs, lists, queues and events as they are shown must be those that
//! were asked for, and must have been so.

use leasehold_core::request::{EventCursor, EventView, JobView, List, QueueView};
use leasehold_core::store::Clock;
use leasehold_core::{JobId, Request, Response};

use super::replies::Window;
use super::{Oracle, Subject};

impl Oracle {
    /// What is wrong with an answer that shows something, if anything is.
    pub(super) fn judge_shown(&self, w: Window, request: &Request, response: &Response) -> Result<(), String> {
        match (request, response) {
            (
                Request::Get { job, .. } | Request::Cancel { job, .. } | Request::Retry { job, .. },
                Response::Job(view),
            ) => {
                if self.is_shown(*job, view) {
                    Ok(())
                } else {
                    Err("it is another job".into())
                }
            }
            (Request::List(asked), Response::Jobs { jobs, .. }) => self.judge_list(w, asked, jobs),
            (Request::Queues { tenant }, Response::Queues(queues)) => {
                let stood = queues.iter().all(|view| self.queue_stood(w, tenant, view));
                if stood { Ok(()) } else { Err("a queue never was so".into()) }
            }
            (Request::Queue { tenant, queue } | Request::SetQueue { tenant, queue, .. }, Response::Queue(view))
            | (Request::Purge { tenant, queue, .. }, Response::Purged { queue: view, .. }) => {
                if view.name != *queue {
                    return Err("it is another queue".into());
                }
                if self.queue_stood(w, tenant, view) { Ok(()) } else { Err("the queue never was so".into()) }
            }
            (Request::Pause { queue, .. } | Request::Resume { queue, .. }, Response::Queue(view)) => {
                if view.name == *queue { Ok(()) } else { Err("it is another queue".into()) }
            }
            (Request::Events { tenant, after, limit, .. }, Response::Events { events, next }) => {
                if events.len() > *limit {
                    return Err("more than asked for".into());
                }
                self.judge_events(tenant, *after, events, *next)
            }
            (Request::HoldUpstream(asked), Response::UpstreamHeld { until }) => {
                let least = w.from.clock + asked.for_ms.min(60_000) * 1_000;
                if *until < least && !self.clock_back { Err("it is shorter than asked for".into()) } else { Ok(()) }
            }
            (Request::Result { job, .. }, Response::NoContent) => {
                if self.has_result(*job, w.from.clock, w.clock) {
                    Err("there is a result".into())
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }

    /// Whether a view is of that job, as it was submitted.
    fn is_shown(&self, job: JobId, view: &JobView) -> bool {
        let submit = self.jobs.get(&job).and_then(|t| t.submit.as_ref());
        view.id == job
            && submit.is_none_or(|s| {
                (&s.queue, s.class, s.payload.data.len() as u64) == (&view.queue, view.class, view.payload_len)
            })
    }

    fn judge_list(&self, w: Window, asked: &List, jobs: &[JobView]) -> Result<(), String> {
        if jobs.len() > asked.limit {
            return Err("more than asked for".into());
        }
        for view in jobs {
            let Some(track) = self.jobs.get(&view.id) else { return Err("there never was such a job".into()) };
            if track.disturbed {
                continue;
            }
            let fits = track.submit.as_ref().is_none_or(|s| s.tenant == asked.tenant)
                && asked.queue.as_ref().is_none_or(|queue| view.queue == *queue)
                && asked.status.is_none_or(|status| view.status == status);
            if !fits || !self.is_shown(view.id, view) {
                return Err("it has a job that was not asked for".into());
            }
            if !self.ever(w, view.id, |m| m.status == Some(view.status)) {
                return Err("a job never stood so".into());
            }
        }
        Ok(())
    }

    fn queue_stood(&self, w: Window, tenant: &str, view: &QueueView) -> bool {
        let fact = self.queue_fact(tenant, &view.name);
        self.rewound || fact.map_or(!view.paused, |q| q.damaged || q.was(view.paused, w.from.change))
    }

    /// Events come in order, none twice, and of nothing that has not happened.
    fn judge_events(
        &self,
        tenant: &str,
        after: EventCursor,
        events: &[EventView],
        next: EventCursor,
    ) -> Result<(), String> {
        let mut last = after;
        for event in events {
            if event.id <= last {
                return Err("events are out of order".into());
            }
            last = event.id;
        }
        if last != next {
            return Err("it goes on elsewhere".into());
        }
        for EventView { event, .. } in events.iter().filter(|_| !self.rewound) {
            let (home, happened) = match Subject::of(event.of) {
                Subject::Job(job) => {
                    let Some(track) = self.jobs.get(&job) else { return Err(format!("an event of nobody: {event:?}")) };
                    let happened = track.disturbed || track.events.get(&event.kind).is_some_and(|n| *n > 0);
                    (track.submit.as_ref().map(|s| &s.tenant), happened)
                }
                Subject::Group(group) => {
                    let Some(track) = self.groups.get(&group) else {
                        return Err(format!("an event of nobody: {event:?}"));
                    };
                    let happened = track.disturbed || track.events.get(&event.kind).is_some_and(|n| *n > 0);
                    (track.asked.as_ref().map(|a| &a.common.tenant), happened)
                }
            };
            if !happened || home.is_some_and(|home| home != tenant) {
                return Err(format!("an event of what has not happened: {event:?}"));
            }
        }
        Ok(())
    }

    /// Whether a job had a result all the time.
    fn has_result(&self, job: JobId, from: Clock, clock: Clock) -> bool {
        let result = self.jobs.get(&job).and_then(|t| t.facts.result.as_ref());
        !self.clock_back && result.is_some_and(|r| r.at < from && r.lives(clock))
    }
}

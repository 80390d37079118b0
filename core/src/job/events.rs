//! Reading the audit log.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::check;
use crate::event::unfold;
use crate::failure::Failure;
use crate::limits;
use crate::replica::task::{Cx, Next, Operation, Wait};
use crate::request::{EventCursor, EventView, Response};
use crate::store::{Answer, Clock, LogRead, Read, Snapshot, keys};

/// Log entries read at once: each can hold as many events as a commit has transactions.
const ENTRIES: usize = 32;

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Events {
    tenant: String,
    after: EventCursor,
    limit: usize,
    wait_ms: u64,
    found: Vec<EventView>,
}

impl Events {
    pub fn new(tenant: String, after: EventCursor, limit: usize, wait_ms: u64) -> Result<Events, Failure> {
        check::within("limit", Some(limit as u64), 1, limits::LIST_MAX as u64)?;
        check::within("wait_ms", Some(wait_ms), 0, limits::WAIT_MS)?;
        Ok(Events { tenant, after, limit, wait_ms, found: Vec::new() })
    }

    pub fn wait_ms(&self) -> u64 {
        self.wait_ms
    }

    fn page(&self) -> Next {
        // The entry of the cursor itself may hold more events than have been seen.
        let after = self.after.seq.saturating_sub(1);
        let log = LogRead { log: keys::audit(&self.tenant), after, limit: ENTRIES + 1 };
        Next::Read(Read { log: Some(log), ..Read::default() })
    }
}

impl Operation for Events {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        self.page()
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let (events, next) = unfold(&snapshot.log, self.after, self.limit - self.found.len());
        self.found.extend(events);
        self.after = next;
        if self.found.len() < self.limit && snapshot.log.len() > ENTRIES {
            return self.page();
        }
        if self.found.is_empty() && self.wait_ms > 0 && !cx.last_try {
            return Next::Wait(Wait::on(vec![keys::audit(&self.tenant)]));
        }
        Next::ok(Response::Events { events: core::mem::take(&mut self.found), next })
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}

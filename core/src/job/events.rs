//! Reading the audit log.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::check;
use crate::event::unfold;
use crate::failure::Failure;
use crate::limits;
use crate::replica::task::{Cx, Next, Operation};
use crate::request::{EventCursor, Response};
use crate::store::{Answer, Clock, LogRead, Read, Snapshot, keys};

#[derive(Clone, Debug)]
pub(crate) struct Events {
    tenant: String,
    after: EventCursor,
    limit: usize,
    wait_ms: u64,
}

impl Events {
    pub fn new(tenant: String, after: EventCursor, limit: usize, wait_ms: u64) -> Result<Events, Failure> {
        check::within("limit", Some(limit as u64), 1, limits::LIST_MAX as u64)?;
        check::within("wait_ms", Some(wait_ms), 0, limits::WAIT_MS)?;
        Ok(Events { tenant, after, limit, wait_ms })
    }

    pub fn wait_ms(&self) -> u64 {
        self.wait_ms
    }
}

impl Operation for Events {
    fn start(&mut self, _: &mut Cx<'_>) -> Next {
        // The entry of the cursor itself may hold more events than have been seen.
        let after = self.after.seq.saturating_sub(1);
        let log = LogRead { log: keys::audit(&self.tenant), after, limit: self.limit + 1 };
        Next::Read(Read { log: Some(log), ..Read::default() })
    }

    fn read(&mut self, snapshot: Snapshot, cx: &mut Cx<'_>) -> Next {
        let (events, next) = unfold(&snapshot.log, self.after, self.limit);
        if events.is_empty() && self.wait_ms > 0 && !cx.last_try {
            self.after = next;
            return Next::Wait(vec![keys::audit(&self.tenant)]);
        }
        Next::ok(Response::Events { events, next })
    }

    fn answered(&mut self, _: Clock, _: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }
}

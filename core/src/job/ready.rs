//! The proof that the store works: a real commit.

use alloc::vec;
use alloc::vec::Vec;
use bytes::Bytes;

use super::moves::put;
use crate::limits;
use crate::replica::task::{Cx, Draft, Next, Operation, Plan, applied};
use crate::request::Response;
use crate::store::{Answer, Clock, Expiry, Read, Snapshot, keys};

#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Ready {
    nonce: u64,
}

impl Ready {
    /// `nonce` names the replica, so that each keeps at most one such record.
    pub fn new(nonce: u64) -> Ready {
        Ready { nonce }
    }
}

impl Operation for Ready {
    fn start(&mut self, cx: &mut Cx<'_>) -> Next {
        if !cx.fresh {
            return Next::Read(Read::default());
        }
        // Harmless to repeat: it says nothing but that it was written.
        let write = put(keys::ready(self.nonce), cx.make.version(), Bytes::new(), Expiry::Clock(limits::MINUTE));
        Next::Commit(Plan::new(vec![Draft::new(Vec::new(), vec![write])]))
    }

    fn read(&mut self, _: Snapshot, cx: &mut Cx<'_>) -> Next {
        self.start(cx)
    }

    fn answered(&mut self, _: Clock, answers: Vec<Answer>, cx: &mut Cx<'_>) -> Next {
        if applied(&answers) { Next::ok(Response::Ready) } else { self.start(cx) }
    }
}

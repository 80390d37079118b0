//! An upstream's answer on its way to the client, with the slot that it needs.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::body::{Body, BrokenOff, Piece};
use crate::routes::App;
use crate::upstream::call::Rest;
use crate::upstream::slot::Slot;

/// Pieces of an answer that a slow client may be behind.
const AHEAD: usize = 4;

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Whole,
    /// The client gets to see that it is not the whole.
    BrokenOff,
    /// Nobody reads it any more.
    Unread,
}

/// The answer's body. A task passes its pieces on and holds the slot.
pub fn body(app: Arc<App>, rest: Rest, slot: Slot) -> Body {
    let (pieces, receiver) = mpsc::channel(AHEAD);
    tokio::spawn(async move {
        if pump(&app, rest, slot, &pieces).await == End::BrokenOff {
            // The client may have gone too.
            let _ = pieces.send(Err(BrokenOff)).await;
        }
    });
    Body::stream(receiver)
}

/// Passes the pieces on until one side ends it, the slot is lost, or the server goes away. The upstream's
/// connection and the slot go with the end.
pub async fn pump(app: &App, mut rest: Rest, mut slot: Slot, pieces: &mpsc::Sender<Piece>) -> End {
    tokio::select! {
        end = pass_on(&mut rest, pieces) => end,
        // Also while a client takes nothing.
        () = slot.lost() => End::BrokenOff,
        () = app.gateway.ended() => End::BrokenOff,
    }
}

async fn pass_on(rest: &mut Rest, pieces: &mpsc::Sender<Piece>) -> End {
    loop {
        let next = tokio::select! {
            next = rest.next() => next,
            // A client that goes is noticed also while the upstream says nothing.
            () = pieces.closed() => return End::Unread,
        };
        match next {
            Ok(Some(piece)) => {
                if pieces.send(Ok(piece)).await.is_err() {
                    return End::Unread;
                }
            }
            Ok(None) => return End::Whole,
            Err(_) => return End::BrokenOff,
        }
    }
}

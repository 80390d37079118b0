//! The connection on which other servers' notifications come.
//!
//! It is nobody's duty: what is lost here costs a waiting poll its fall-back, and nothing else.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use leasehold_core::Name;
use redis::{Client, ConnectionInfo, RedisError};
use tokio::sync::{mpsc, watch};

use crate::call::{Caller, random};

/// Between two questions whether the server is still there.
const PULSE: Duration = Duration::from_secs(10);
/// A server that has not answered by then is not there.
const PATIENCE: Duration = Duration::from_secs(4);
const PAUSE: Duration = Duration::from_millis(200);

/// Where the primary is, by position, and how often it has been found: each change asks for a new
/// connection.
pub(crate) type Place = Option<(usize, u64)>;

/// Listens until nobody hears. One message carries the topics of one commit.
pub(crate) async fn listen(
    caller: Arc<Caller>,
    servers: Vec<ConnectionInfo>,
    mut place: watch::Receiver<Place>,
    topics: mpsc::Sender<Vec<Name>>,
) {
    loop {
        let now = *place.borrow_and_update();
        if let Some(info) = now.and_then(|(server, _)| servers.get(server)) {
            tokio::select! {
                changed = place.changed() => {
                    if changed.is_err() { return }
                    continue;
                }
                ended = subscribed(&caller, info.clone(), &topics) => match ended {
                    Ok(()) => return,
                    Err(error) => tracing::debug!(%error, "no notifications for a moment"),
                },
            }
            let jitter = random() % (PAUSE.as_millis() as u64);
            tokio::time::sleep(PAUSE + Duration::from_millis(jitter)).await;
        } else if place.changed().await.is_err() {
            return;
        }
    }
}

async fn subscribed(caller: &Caller, info: ConnectionInfo, topics: &mpsc::Sender<Vec<Name>>) -> Result<(), RedisError> {
    let silent = |_| RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
    let client = Client::open(info)?;
    let mut pubsub = tokio::time::timeout(PATIENCE, client.get_async_pubsub()).await.map_err(silent)??;
    tokio::time::timeout(PATIENCE, pubsub.subscribe(caller.layout.channel())).await.map_err(silent)??;
    let (mut sink, mut stream) = pubsub.split();
    let mut pulse = tokio::time::interval(PULSE);
    loop {
        tokio::select! {
            message = stream.next() => {
                let Some(message) = message else { return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into()) };
                if let Some(found) = parse(&caller.sender, message.get_payload_bytes())
                    && topics.send(found).await.is_err()
                {
                    return Ok(());
                }
            }
            _ = pulse.tick() => {
                let pong: redis::Value = tokio::time::timeout(PATIENCE, sink.ping()).await.map_err(silent)??;
                drop(pong);
            }
        }
    }
}

/// The topics of a message: the sender, then each topic with its length before it. Nothing for our
/// own, which we knew before, and for what is not a message.
fn parse(own: &[u8; 8], message: &[u8]) -> Option<Vec<Name>> {
    let (sender, mut rest) = message.split_first_chunk::<8>()?;
    if sender == own {
        return None;
    }
    let mut topics = Vec::new();
    while let Some((len, after)) = rest.split_first_chunk::<4>() {
        let (topic, after) = after.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        topics.push(Name::new(topic));
        rest = after;
    }
    (rest.is_empty() && !topics.is_empty()).then_some(topics)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_others_and_nothing_else() {
        let own = *b"12345678";
        let message = [&b"87654321"[..], &[0, 0, 0, 3], b"q/a", &[0, 0, 0, 0], &[0, 0, 0, 1], b"b"].concat();
        assert_eq!(parse(&own, &message), Some(vec![Name::from("q/a"), Name::from(""), Name::from("b")]));
        assert_eq!(parse(b"87654321", &message), None);
        for cut in 0..message.len() {
            let found = parse(&own, &message[..cut]);
            assert!(found.is_none() || [15, 19].contains(&cut), "{cut}");
        }
    }
}

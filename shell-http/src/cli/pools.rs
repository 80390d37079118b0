//! `leasehold pools`: looking at pools, making, changing and deleting one.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::client::{Call, Client, Trouble};
use super::table::{Align, Cell, Table};
use super::terminal::{Colour, printable};
use super::{Failed, To, print_line, time};
use crate::wire::query;

/// Show pools; make, change or delete one
#[derive(Args, Debug)]
#[command(after_help = "\
With --json each pool is an object on a line of its own, as in the answer of GET /v1/pools/{pool}.

Examples:
  leasehold pools
  leasehold pools gpu --total 8 --batch-max 6
  leasehold pools gpu --total 4
  leasehold pools gpu --json
  leasehold pools gpu --delete

Exit codes: 0 done, 1 refused or unknown, 2 wrong usage, 3 the server cannot be reached.")]
pub struct Pools {
    #[command(flatten)]
    to: To,
    /// One pool only, with who holds it
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// Units that are held at a time; makes the pool if there is none
    #[arg(long, requires = "name")]
    total: Option<u64>,
    /// How many of them class batch may hold
    #[arg(long, requires = "name")]
    batch_max: Option<u64>,
    /// How long a slot is held unless it is refreshed
    #[arg(long, requires = "name", value_name = "TIME", value_parser = time)]
    lease: Option<Duration>,
    /// Delete the pool; nobody may hold or wait
    #[arg(long, requires = "name", conflicts_with_all = ["total", "batch_max", "lease"])]
    delete: bool,
    /// Print JSON, an object a line
    #[arg(long)]
    pub json: bool,
}

impl Pools {
    pub async fn run(self) -> Result<(), Failed> {
        let mut client = Client::new(self.to.server.clone());
        let path = self.name.as_ref().map(|name| format!("/v1/pools/{}", query::encode(name)));
        let pools = match path {
            None => client.call(&Call::get("/v1/pools")).await?.json()?["pools"].clone(),
            Some(path) if self.delete => {
                client.call(&Call::delete(path)).await?;
                say!("deleted");
                return Ok(());
            }
            Some(path) => json!([self.one(&mut client, path).await?]),
        };
        print_pools(&pools, self.json).iter().try_for_each(|line| print_line(line))
    }

    async fn one(&self, client: &mut Client, path: String) -> Result<Value, Trouble> {
        let mut body = json!({});
        if let Some(total) = self.total {
            body["total"] = total.into();
        }
        if let Some(batch_max) = self.batch_max {
            body["batch_max"] = batch_max.into();
        }
        if let Some(lease) = self.lease {
            body["lease_ms"] = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX).into();
        }
        let asked = body.as_object().is_some_and(|fields| !fields.is_empty());
        let call = if asked { Call::put(path, body.to_string()) } else { Call::get(path) };
        client.call(&call).await?.json()
    }
}

/// Pools as lines: JSON, or a table, below it who holds them if that is known.
pub fn print_pools(pools: &Value, as_json: bool) -> Vec<String> {
    let pools = pools.as_array().map(Vec::as_slice).unwrap_or_default();
    if as_json {
        return pools.iter().map(Value::to_string).collect();
    }
    if pools.is_empty() {
        return vec!["no pools: make one with `leasehold pools NAME --total N`".into()];
    }
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let right = ["in use", "total", "batch", "of", "interactive", "system", "batch"];
    let mut columns = vec![("pool", Align::Left)];
    columns.extend(right.map(|title| (title, Align::Right)));
    let mut table = Table::new(columns);
    for pool in pools {
        let (used, total) = (number(&pool["in_use"]), number(&pool["total"]));
        let mut row = vec![Cell::plain(printable(pool["name"].as_str().unwrap_or_default()))];
        row.push(Cell(used.to_string(), if used >= total { Colour::Yellow } else { Colour::Plain }));
        row.extend(
            [total, number(&pool["batch_in_use"]), number(&pool["batch_max"])].map(|n| Cell::plain(n.to_string())),
        );
        let waits = ["interactive", "system", "batch"].map(|class| number(&pool["waiting"][class]));
        row.extend(waits.map(|n| Cell(n.to_string(), if n == 0 { Colour::Dim } else { Colour::Plain })));
        table.row(row);
    }
    let mut lines = table.lines();
    let holders: Vec<&Value> = pools.iter().flat_map(|p| p["holders"].as_array().into_iter().flatten()).collect();
    if !holders.is_empty() {
        let titles =
            [("slot or job", Align::Left), ("holder", Align::Left), ("class", Align::Left), ("cost", Align::Right)];
        let mut table = Table::new(titles.into_iter().chain([("until", Align::Left)]).collect());
        for held in holders {
            let text = |name: &str| Cell::plain(printable(held[name].as_str().unwrap_or_default()));
            let cost = Cell::plain(number(&held["cost"]).to_string());
            let of = if held["id"].is_null() { "job" } else { "id" };
            table.row(vec![text(of), text("holder"), text("class"), cost, text("expires_at")]);
        }
        lines.push(String::new());
        lines.extend(table.lines());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_who_holds_and_how_many_wait() {
        let pools = json!([{
            "name": "gpu\u{1b}", "total": 8, "batch_max": 6, "in_use": 3, "batch_in_use": 2,
            "waiting": {"interactive": 0, "system": 1, "batch": 12},
            "holders": [
                {"id": "a:1", "holder": "w1", "class": "batch", "cost": 2, "expires_at": "T"},
                {"job": "01J", "class": "system", "cost": 1, "expires_at": "T"},
            ],
        }]);
        let expected = [
            "pool  in use  total  batch  of  interactive  system  batch",
            "gpu\u{fffd}       3      8      2   6            0       1     12",
            "",
            "slot or job  holder  class   cost  until",
            "a:1          w1      batch      2  T",
            "01J                  system     1  T",
        ];
        assert_eq!(print_pools(&pools, false), expected);
        assert_eq!(print_pools(&pools, true).len(), 1);
        assert_eq!(print_pools(&json!([]), false).len(), 1);
    }
}

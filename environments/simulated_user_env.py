"""Serve the users of a shop by tools, and keep its policy; the user is played by another model.

The model talks to a user, who knows its own scenario alone, and changes the shop's database by tools. The tools do not
enforce the policy. The reward is 1 if the database at the end equals that after the expected actions, and what the user
must learn was said, else 0; a conversation that does not end is 0. The user's messages are never trained on.

Without --user.base_url a script plays the user: its request, then all it knows, then the end.

Data: JSONL rows in the form of tau2-bench's tasks, with this shop's database (`initialization_data.agent_data`, or
--env.database_path). Another domain is a subclass of `SimulatedUserEnv` with its policy and tools.
Needs: --user.base_url for a user that is not scripted.

    python environments/simulated_user_env.py process --env.dataset_path sample ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atroposlib.envs.multi_turn_env import Episode, in_turns
from atroposlib.envs.simulated_user import SimulatedUserConfig, SimulatedUserEnv
from atroposlib.envs.tool_env import ToolFailure, hermes_call

POLICY = """\
- First find the customer by the e-mail address. Show or change only orders of this customer.
- An order is pending, shipped or delivered. Only a pending order can be cancelled, and only as a whole. Its address can
  be changed while it is pending.
- Items of a delivered order can be returned within 30 days of the delivery. A returned item is refunded with its price;
  items of the kind "final sale" are not returned.
- An item of a pending order can be exchanged for another product of the same kind that is in stock.
- If the policy forbids what the user asks for, change nothing and say why. Do not ask for anything that a tool tells.
- Say the amount of a refund or a difference in price, as 12.50."""


def _entry(episode: Episode, table: str, key: str) -> dict[str, Any]:
    """Return an entry of the database; the model gets the error if there is none."""
    entries: dict[str, dict[str, Any]] = episode.state["database"][table]
    if key not in entries:
        raise ToolFailure("unknown_entry", f"there is no {key!r} in {table}")
    return entries[key]


def find_customer(email: str, episode: Episode) -> dict[str, Any]:
    """Return the customer with an e-mail address, with the numbers of the orders."""
    return _entry(episode, "customers", email.strip().lower())


def get_order(order_id: str, episode: Episode) -> dict[str, Any]:
    """Return an order: status, days since the delivery, address and items with their prices."""
    return _entry(episode, "orders", order_id)


def list_products(kind: str, episode: Episode) -> dict[str, Any]:
    """Return the products of a kind, with price and stock."""
    products = episode.state["database"]["products"]
    return {name: each for name, each in products.items() if each["kind"] == kind}


def cancel_order(order_id: str, episode: Episode) -> dict[str, Any]:
    """Cancel an order and refund it."""
    order = _entry(episode, "orders", order_id)
    order["status"] = "cancelled"
    return {"refund": round(sum(item["price"] for item in order["items"]), 2)}


def change_address(order_id: str, address: str, episode: Episode) -> dict[str, Any]:
    """Change the address of an order."""
    order = _entry(episode, "orders", order_id)
    order["address"] = " ".join(address.split())
    return order


def return_items(order_id: str, products: list[str], episode: Episode) -> dict[str, Any]:
    """Take back items of an order and refund them."""
    items = _items(_entry(episode, "orders", order_id), products)
    for item in items:
        item["is_returned"] = True
    return {"refund": round(sum(item["price"] for item in items), 2)}


def exchange_item(order_id: str, product: str, other: str, episode: Episode) -> dict[str, Any]:
    """Exchange an item of an order for another product; return the difference in price."""
    chosen = _entry(episode, "products", other)
    [item] = _items(_entry(episode, "orders", order_id), [product])
    difference = chosen["price"] - item["price"]
    item.update(product=other, price=chosen["price"])
    return {"difference": round(difference, 2)}


def _items(order: dict[str, Any], products: list[str]) -> list[dict[str, Any]]:
    found = [item for item in order["items"] if item["product"] in products]
    if not products or len(found) != len(products):
        raise ToolFailure("unknown_entry", f"the order has not each of {products} once")
    return found


class ShopEnv(SimulatedUserEnv):
    """A shop with customers, orders and products."""

    name = "simulated_user"
    env_config_cls = SimulatedUserConfig
    policy = POLICY
    tools = (
        *(find_customer, get_order, list_products),
        *(cancel_order, change_address, return_items, exchange_item),
    )

    def example_answers(self, item: dict[str, Any]) -> list[Callable[[str], str]]:
        """Return a player that asks who the user is, does what is expected, and says what must be said."""
        criteria = item["evaluation_criteria"]
        calls = [hermes_call(each["name"], **each["arguments"]) for each in criteria["actions"]]
        told = ", ".join(criteria["communicate_info"]) or "It is done"
        last = f"Here is what you need to know: {told}."
        return [in_turns(["What is your e-mail address?", *calls, last])]


if __name__ == "__main__":
    ShopEnv.cli()

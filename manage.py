"""The command line of this application: `python manage.py --help`."""

from __future__ import annotations

from typing import Any

import click
import peewee
import psycopg2
import redis
from environs import EnvError

from commands.dead_letters import dead_letters
from commands.interruption import InterruptedBySignal
from commands.message import message
from embedded import ServerError
from middleware.errors import OnetakeError

# What reads the settings is imported by the command that needs it: a wrong setting is then one of
# the failures that end in a sentence.


class Commands(click.Group):
    """Commands whose expected failures are a sentence for the reader, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InterruptedBySignal as error:
            click.echo(f"Ended by {error}.", err=True)
            ctx.exit(error.exit_code)
        except (EnvError, OnetakeError, ServerError) as error:
            raise click.ClickException(str(error)) from error
        except (peewee.DatabaseError, psycopg2.Error) as error:
            raise click.ClickException(
                f"PostgreSQL says: {str(error).strip()}\nIs its server running, and is DATABASE_URL right?"
            ) from error
        except redis.RedisError as error:
            raise click.ClickException(
                f"Redis says: {error}\nIs its server running, and is REDIS_URL right?"
            ) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def manage() -> None:
    """Onetake: every message takes effect once, however often it is delivered."""


@manage.command()
def up() -> None:
    """Run all of the Procfile until Ctrl-C; what dies is started again.

    Without DATABASE_URL or REDIS_URL it starts a server of its own in their place and keeps its
    data. It migrates first and loads the sample data.
    """
    from commands.up import up as run

    run()


@manage.command()
def demo() -> None:
    """Sell 300 orders, each delivered three times, kill and empty what they need, and count."""
    from commands.demo import demo as run

    run()


@manage.command()
def migrate() -> None:
    """Bring the tables up to date; several at once do no harm."""
    from models import migrate as run

    applied = run()
    click.echo("\n".join(f"Applied {name}." for name in applied) or "The tables are up to date.")


@manage.command()
def relay() -> None:
    """Publish what is due and look after what Redis has lost, until SIGTERM or Ctrl-C."""
    from commands.relay import relay as run

    run()


manage.add_command(dead_letters)
manage.add_command(message)


@manage.command("sample-data")
def sample_data() -> None:
    """Put SKU-1 to SKU-10 in stock, where they are not known yet."""
    from models import load_sample_data

    click.echo(f"Added {load_sample_data()} articles.")


if __name__ == "__main__":
    manage()

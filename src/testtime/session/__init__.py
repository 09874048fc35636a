"""The loop: a stream of images through one method, kept and gone on with."""

from testtime.session.session import Session as Session

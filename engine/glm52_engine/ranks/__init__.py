"""Replicas of several hosts: who has which ranks, how they find each other, and how they step together."""
